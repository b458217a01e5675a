"""The toy: a synthetic coding clinic that a tiny model learns from scratch in minutes.

    python data/toy/prepare.py --work work/toy

A code is a region letter and a two-digit leaf (K17). The candidate list says `qualifier finding code`, one after another; all
codes of a finding share its region. A note is a numbered problem list, (qualifier, finding) pairs among noise words; the trace takes
them in order, one a line: the quoted words, a few linking words of varying number, then the candidate's words and its code. Where
the note says `possible`, it first says `not`, another candidate of the region with its code (the near-miss), `but`, then its own.
The answer quotes each problem again, with its code.

Which letter stands for which finding, and which digits for which qualifier, is drawn anew for every training episode, so
that a model must read the list; the task itself has one fixed list (knock-in between notes needs one), and its notes are
drawn from other random numbers than the episodes. Nothing of the mechanism is planted: the model is trained from scratch.

Writes labels.jsonl, notes.jsonl, prompt.json, gold.jsonl (a right trace of every note), train/*.jsonl (the lessons for distill.py --data,
in order: copy, far, short, long) and the folders init/teacher, init/second and init/student: config.json and
tokenizer, no weights; Llama of 24 heads, Qwen2 of 18 with the same tokenizer, that Qwen2 with another.
"""
import argparse
import json
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from common import SPLITS, at_least, private_dir, write_jsonl, write_text  # noqa: E402

FINDINGS = 'fever cough rash nausea fracture anemia edema asthma ulcer migraine hernia gout abscess stroke sepsis lesion'.split()
QUALIFIERS = 'acute chronic mild severe left right recurrent early late upper lower deep benign focal painful stable'.split()
NOISE = ('patient came with family after dinner walked slowly spoke about work garden weather denied travel slept well ate little '
         'took water yesterday morning nurse noted calm mood room quiet asked for blanket smiled later').split()
LINKS = 'to be read as'.split()                        # a trace takes the last 0 to 4 of them
ORDINALS = 'first second third fourth fifth sixth'.split()
LETTERS = 'ABCDEFGHIJKLMNOPQRST'
TEACHER = r' ?[A-Z](?=\d)| ?[A-Za-z]+|\d|\s|[^\w\s]'                                # where tokens are cut: " K", "1", "7"
STUDENT = r' ?[A-C]\d(?=\d)| ?[A-Z](?=\d)| ?[A-Za-z]{1,5}|\d|\s|[^\w\s]'                 # " K", "1", "7", but " A1", "7", and long words in pieces
PROMPT = {'prefix': 'Candidates:\n{list}', 'before_note': '\nNote:', 'after_note': '\nTrace:\n', 'answer': 'Final codes:', 'probe': ' as '}


def draw_list(rng, regions, leaves):
    """{finding: {qualifier: code}}: `regions` findings with a letter each, `leaves` (at most 10) qualifiers with two digits
    each. Every region has the same first digits, each once: one fine decision a code, and no digit that tells the region."""
    table, first = {}, rng.sample(range(10), leaves)
    for finding, letter in zip(rng.sample(FINDINGS, regions), rng.sample(LETTERS, regions)):
        table[finding] = {q: f'{letter}{d}{rng.randrange(10)}' for q, d in zip(rng.sample(QUALIFIERS, leaves), rng.sample(first, leaves))}
    return table


def list_text(rng, table):
    entries = [f' {q} {f} {c}' for f, row in table.items() for q, c in row.items()]
    rng.shuffle(entries)
    return PROMPT['prefix'].format(list=''.join(entries))


def draw_note(rng, table, mentions):
    """(text, [(finding, qualifier, code, doubtful, start, end)]); start, end: characters of `qualifier finding`."""
    text, found = '', []
    for o, f in zip(ORDINALS, rng.sample(list(table), min(mentions, len(table)))):
        q = rng.choice(list(table[f]))
        doubt = rng.random() < 0.5 and len(table[f]) > 1
        text += f' {o} possible' if doubt else f' {o}'
        found.append((f, q, table[f][q], doubt, len(text) + 1, len(text) + 1 + len(f'{q} {f}')))
        text += f' {q} {f}' + ''.join(f' {w}' for w in rng.sample(NOISE, rng.randint(1, 2)))
    return text, found


def draw_trace(rng, table, found, links=len(LINKS), bare=0.0):
    """bare: share of lines without doubt whose code follows the linking words at once, so that a code can be asked for there
    (PROMPT's probe); a greedy trace takes the longer way."""
    text, answer = '', PROMPT['answer']
    for o, (f, q, code, doubt, _, _) in zip(ORDINALS, found):
        near = rng.choice([x for x in table[f] if x != q]) if doubt else None
        quoted = f' {o} possible {q} {f}' if doubt else f' {o} {q} {f}'
        text += quoted + ''.join(f' {w}' for w in LINKS[len(LINKS) - rng.randint(0, links):])
        text += f' not {near} {f} {table[f][near]} but' if near else ''
        text += f' {code}\n' if text.endswith(LINKS[-1]) and rng.random() < bare else f' {q} {f} {code}\n'
        answer += f'{quoted} {code}'
    return text + answer


# lessons of episodes: up to this share of one, regions and leaves of a list, mentions of a note (lowest, highest). Digits are
# learned on short lists, each note with its own, or not at all
SHORT = ((0.5, (2, 3), (1, 2), (1, 3)), (1.0, (2, 5), (1, 3), (1, 5)))
LONG = ((0.1, (3, 8), (2, 5), (2, 6)), (0.25, (3, 12), (2, 7), (2, 6)), (1.0, (8, 12), (4, 8), (2, 6)))


def episodes(rng, n, stages, links, notes=1):
    """n episodes, from easy to hard, `notes` of them after each list ("prefix", which distill.py --prefix shared reads once).
    Sizes are mixed at every stage, so that a batch is never of one difficulty. Linking words come in one by one: at most
    links * (share of the lesson), at most all."""
    for i in range(n):
        regions, leaves, mentions = next(s for s in stages if i < s[0] * n)[1:]
        if i % notes == 0:
            table = draw_list(rng, rng.randint(*regions), rng.randint(*leaves))
            text = list_text(rng, table)
        note, found = draw_note(rng, table, rng.randint(*mentions))
        trace = draw_trace(rng, table, found, min(len(LINKS), int(links * i / n)), 0.2 if notes > 1 else 0)
        prompt = PROMPT['before_note'] + note + PROMPT['after_note']
        yield {'prefix': text, 'prompt': prompt, 'completion': trace} if notes > 1 else {'prompt': text + prompt, 'completion': trace}


def copies(rng, n, far=False):
    """n sequences of words and codes, each said again and again: what teaches a small transformer to copy by content. Periods
    are mixed in every batch, so that no fixed distance does it. The first quarter draws from all words; then each sequence
    has few words and letters, so that the token before is not enough and longer contexts must be matched. far: up to 240
    words long; what is learned on short sequences does not reach far by itself."""
    every = FINDINGS + QUALIFIERS + NOISE + LINKS + ORDINALS
    for i in range(n):
        pool, letters = (every, LETTERS) if i < n / 4 and not far else (rng.sample(every, rng.randint(4, 12)), rng.sample(LETTERS, rng.randint(1, 4)))
        length = int(24 * 10 ** rng.random()) if far else 36
        period = rng.randint(4, length // 2)
        words = [rng.choice(pool) if rng.random() < 0.7 else f'{rng.choice(letters)}{rng.randrange(100):02d}' for _ in range(period)]
        yield {'prompt': ' ' + ' '.join(words), 'completion': ''.join(f' {words[i % period]}' for i in range(length - period))}


LESSONS = {'copy': copies, 'far': lambda rng, n: copies(rng, n, True), 'short': lambda rng, n: episodes(rng, n, SHORT, 3.2), 'long': lambda rng, n: episodes(rng, n, LONG, 12, notes=8)}


def tokenizer(folder, pattern, texts):
    """A word-level tokenizer: pieces cut by `pattern` (a leading space belongs to its piece), vocabulary from texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    cut = pre_tokenizers.Split(Regex(pattern), 'isolated')
    pieces = sorted({p for t in texts for p, _ in cut.pre_tokenize_str(t)})
    special = ['<unk>', '<s>', '</s>']
    tok = Tokenizer(models.WordLevel({p: i for i, p in enumerate(special + pieces)}, unk_token='<unk>'))
    tok.pre_tokenizer, tok.decoder = cut, decoders.Fuse()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token='<unk>', bos_token='<s>', eos_token='</s>', clean_up_tokenization_spaces=False)
    tok.save_pretrained(folder)
    return len(tok)


def counts(names):
    """An argparse type: 'name=number,...' with some of names -> {name: number}."""
    def table(text):
        pairs = [x.partition('=') for x in text.split(',')]
        if not all(k in names and n.isdigit() for k, _, n in pairs):
            raise argparse.ArgumentTypeError(f'{text}: expected NAME=NUMBER,... with names of {", ".join(names)}')
        return {k: int(n) for k, _, n in pairs}
    return table


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--work', required=True, help='work directory to write')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--regions', type=at_least(1, len(FINDINGS)), default=12, help='regions of the fixed list')
    p.add_argument('--leaves', type=at_least(1, 10), default=8, help='codes of a region')
    p.add_argument('--notes', type=counts(SPLITS), default='train=160,dev=40,discovery=60,test=60', help='notes of each split')
    p.add_argument('--train', type=counts(LESSONS), default='copy=10560,far=1024,short=3840,long=3072', help='records of each lesson')
    args = p.parse_args()
    from transformers import LlamaConfig, Qwen2Config
    work = private_dir(args.work)
    if (work / 'notes.jsonl').exists():
        return print(f'{work} is there already')
    rng = random.Random(f'task {args.seed}')
    table = draw_list(rng, args.regions, args.leaves)
    prefix = list_text(rng, table)
    notes, gold = [], []
    for split, n in args.notes.items():
        for i in range(n):
            text, found = draw_note(rng, table, rng.randint(2, 5))
            notes.append({'id': f'{split}-{i:04d}', 'text': text, 'codes': [m[2] for m in found], 'split': split,
                          'evidence': [{'code': m[2], 'start': m[4], 'end': m[5]} for m in found]})
            gold.append({'id': notes[-1]['id'], 'completion': draw_trace(rng, table, found), 'codes': notes[-1]['codes'], 'truncated': False})
    private_dir(work / 'train')
    for lesson, n in args.train.items():
        rng = random.Random(f'{lesson} {args.seed}')
        write_jsonl(work / 'train' / f'{lesson}.jsonl', LESSONS[lesson](rng, n))
    words = FINDINGS + QUALIFIERS + NOISE + LINKS + ORDINALS + ['possible', 'not', 'but']
    texts = [' ' + ' '.join(words), *(f'\n{w}' for w in words), *(f' {c}{d:02d}' for c in LETTERS for d in range(100)),
             PROMPT['prefix'] + PROMPT['before_note'] + PROMPT['after_note'] + PROMPT['answer']]
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2, max_position_embeddings=2048, initializer_range=0.02,
               rope_parameters={'rope_type': 'default', 'rope_theta': 1e6})     # slow frequencies: what is learned on short lists holds on long ones
    one = tokenizer(work / 'init' / 'teacher', TEACHER, texts)
    two = tokenizer(work / 'init' / 'student', STUDENT, texts)
    tokenizer(work / 'init' / 'second', TEACHER, texts)
    shape = dict(num_hidden_layers=3, head_dim=32, tie_word_embeddings=False)
    LlamaConfig(vocab_size=one, hidden_size=128, intermediate_size=384, num_attention_heads=8, num_key_value_heads=4, **shape, **ids).save_pretrained(work / 'init' / 'teacher')
    for name, size in (('second', one), ('student', two)):
        Qwen2Config(vocab_size=size, hidden_size=96, intermediate_size=288, num_attention_heads=6, num_key_value_heads=3, **shape, **ids).save_pretrained(work / 'init' / name)
    write_jsonl(work / 'gold.jsonl', gold)
    write_jsonl(work / 'notes.jsonl', notes)
    write_jsonl(work / 'labels.jsonl', [{'code': c, 'text': f'{q} {f}', 'region': c[0]} for f, row in table.items() for q, c in row.items()])
    write_text(work / 'prompt.json', json.dumps(PROMPT | {'prefix': prefix}, indent=1))
    said = lambda table: ', '.join(f'{n} {k}' for k, n in table.items())
    print(f'{work}: {args.regions * args.leaves} codes in {args.regions} regions, {len(notes)} notes ({said(args.notes)}), lessons of {said(args.train)} records\n'
          f'next: python distill.py --work {work} --student {work}/init/teacher --scratch --data {work}/train/copy.jsonl --name copy')


if __name__ == '__main__':
    main()
