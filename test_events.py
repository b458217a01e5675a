"""Tokens, tries and events: METHOD.md's rules on small inputs, over tokenizers of several kinds."""
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common import EarlySites, Encoder, EventFinder, Fault, Task, Trie, answer_codes, list_regions, mentions, reading_spans, spans

TEXT = ['notes E11.9 E11 E11.65 I10 I11.0 (code: E11.9) but not E11.65\nFinal codes: E11.9 I10 I11.0 I10, the “quoted” naïve word K17 K42 0123456789'] * 4


def tokenizer(kind):
    if kind == 'word':
        pattern = pre_tokenizers.Split(Regex(r' ?[A-Z](?=\d)| ?[A-Za-zïä]+|\d|\s|[^\w\s]'), 'isolated')
        pieces = sorted({p for t in TEXT for p, _ in pattern.pre_tokenize_str(t)} | {f' {c}' for c in 'ABCDEFGHIJK'} | set('0123456789') | set('ABCDEFGHIJK'))
        tok = Tokenizer(models.WordLevel({p: i for i, p in enumerate(['<unk>', '<s>', '</s>'] + pieces)}, unk_token='<unk>'))
        tok.pre_tokenizer, tok.decoder = pattern, decoders.Fuse()
    elif kind in ('bytes', 'bytes-digits'):
        tok = Tokenizer(models.BPE())
        split = [pre_tokenizers.Digits(individual_digits=True)] if kind == 'bytes-digits' else []
        tok.pre_tokenizer = pre_tokenizers.Sequence(split + [pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tok.decoder = decoders.ByteLevel()
        tok.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=['<unk>', '<s>', '</s>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    else:                                                         # sentencepiece style: a prefix space, metaspace, byte fallback off
        tok = Tokenizer(models.BPE(unk_token='<unk>'))
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tok.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, special_tokens=['<unk>', '<s>', '</s>'], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tok, unk_token='<unk>', bos_token='<s>', eos_token='</s>', clean_up_tokenization_spaces=False)


KINDS = ['word', 'bytes', 'bytes-digits', 'metaspace']


def task(codes, answer='Final codes:', **chapter):
    labels = [{'code': c, 'text': c, 'region': c.split('.')[0][:3] if c[0] in 'EI' else c[0], **({'chapter': chapter[c[0]]} if c[0] in chapter else {})} for c in codes]
    return Task(None, labels, {}, {'prefix': 'List', 'before_note': '', 'after_note': '', 'answer': answer}, '')


def find(kind, codes, completion, truncated=False, **kw):
    t = task(codes, **kw.pop('task', {}))
    enc = Encoder(tokenizer(kind), t)
    trace = {'id': 'n', 'completion': completion, 'codes': answer_codes(completion, t), 'truncated': truncated}
    events, dropped = EventFinder(enc, **kw)('n', trace, 10)
    return events, dropped, enc


def check(events, enc, completion):
    """What holds for every event: its target is the token after its query, inside the code it names, never at token 0."""
    ids, offs = enc.completion(completion)
    for e in events:
        at = e['query'] - 10 + 1
        assert ids[at] == e['target'] and e['target'] not in e['foils'] and e['foils'] and e['query'] >= 9
        assert offs[at][0] <= e['start'] < e['end'] <= offs[at][1]
        assert e['phase'] != 'contrast' or (len(e['foils']) == 1 and e['near_miss'])


@pytest.mark.parametrize('kind', KINDS)
def test_all_three_phases(kind):
    text = ' naïve “quoted” (code: not E11.65 but E11.9)\n (code: I10)\nFinal codes: E11.9 I10'
    events, dropped, enc = find(kind, ['E11.9', 'E11.65', 'I10', 'I11.0'], text)
    check(events, enc, text)
    merged = all(e['merged'] for e in events if e['phase'] == 'coarse')      # region and code in one token leave no fine event
    assert {e['phase'] for e in events} == ({'coarse', 'contrast'} if merged else {'coarse', 'fine', 'contrast'})
    assert merged == (kind == 'metaspace')
    assert {(d['code'], d['reason'].split(':')[0]) for d in dropped} == {('E11.65', 'withdrawn')}
    contrast = [e for e in events if e['phase'] == 'contrast']
    assert [(e['code'], e['near_miss']) for e in contrast] == [('E11.9', 'E11.65')]
    assert text[contrast[0]['start']:].startswith('E11.9)' if merged else '9)')          # where 9 departs from 65
    assert all(e['start'] >= text.index('but E11.9') + 4 for e in events if e['code'] == 'E11.9')


@pytest.mark.parametrize('kind', KINDS)
def test_a_code_that_is_a_prefix_of_another(kind):           # fault 31
    text = ' (code: E11)\n (code: I10)\nFinal codes: E11 I10'
    events, _, enc = find(kind, ['E11', 'E11.9', 'I10'], text)
    check(events, enc, text)
    assert {e['code'] for e in events} == {'E11', 'I10'}
    assert mentions(text, {'E11': 0, 'E11.9': 1})[0][:2] == (8, 11) and not mentions('E11.65 XE11 E119', {'E11': 0})[1:]
    single = find(kind, ['E11.9', 'I10'], ' E11.9\nFinal codes: E11.9')[0]
    assert [e['phase'] for e in single] == ['coarse']            # after the region only one remains: no fine event


@pytest.mark.parametrize('kind', KINDS)
def test_a_decoy_before_the_true_mention(kind):               # fault 21: same words scrambled, same digits, inside a longer code
    text = ' E 11 9 E119 E11.9x 11.9 E11.65\n (code: E11.9)\nFinal codes: E11.9'
    events, _, enc = find(kind, ['E11.9', 'E11.65', 'I10'], text)
    check(events, enc, text)
    assert all(e['start'] >= text.index('E11.9)') for e in events) and events


def test_repeated_and_withdrawn_mentions():                   # fault 32: the first mention decides; contrast the first after the near-miss
    text = ' E11.9 then E11.65 or E11.9 and I10\nFinal codes: E11.9'
    events, dropped, enc = find('word', ['E11.9', 'E11.65', 'I10', 'I11.0'], text)
    check(events, enc, text)
    first, second = text.index('E11.9'), text.index('E11.9', 5)
    assert {e['start'] >= second for e in events if e['phase'] == 'contrast'} == {True}
    assert {first <= e['start'] < first + 5 for e in events if e['phase'] != 'contrast'} == {True}
    assert {d['code'] for d in dropped} == {'E11.65', 'I10'}


def test_near_miss_of_the_chapter_when_none_of_the_region():
    text = ' I10 but E11.9\nFinal codes: E11.9'
    codes = ['E11.9', 'E11.65', 'I10']
    assert not [e for e in find('word', codes, text)[0] if e['phase'] == 'contrast']
    events = find('word', codes, text, task={'E': 'x', 'I': 'x'})[0]
    assert [e['near_miss'] for e in events if e['phase'] == 'contrast'] == ['I10']


def test_truncated_and_unanswered_traces_make_no_events():    # fault 30
    events, dropped, _ = find('word', ['E11.9', 'E11.65', 'I10'], ' E11.9', truncated=True)
    assert not events and dropped == [{'id': 'n', 'code': 'E11.9', 'reason': 'trace truncated'}]
    events, dropped, _ = find('word', ['E11.9', 'E11.65', 'I10'], ' E11.9 and so on')
    assert not events and dropped[0]['reason'].startswith('withdrawn')


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_trie_equals_nested_sets(data):
    """Sorted arrays against the definition, on random token sequences and partitions."""
    seqs = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True))
    region = data.draw(st.lists(st.integers(0, 2), min_size=len(seqs), max_size=len(seqs)))
    i = data.draw(st.integers(0, len(seqs) - 1))
    coarse = data.draw(st.sampled_from(['first', 'settling']))
    y, found = seqs[i], []
    for d in range(len(y)):
        here = [(s, r) for s, r in zip(seqs, region) if s[:d] == y[:d] and len(s) > d]
        mine = {s[d] for s, r in here if r == region[i]}
        out, stay = {s[d] for s, _ in here} - mine, mine - {y[d]}
        found.append((d, sorted(out), sorted(stay)))
    places = [f[0] for f in found if f[1]]
    at = (places[0] if coarse == 'first' else places[-1]) if places else -1
    want = ([('coarse', at, found[at][1])] if places else []) + [('fine', d, s) for d, _, s in found if d > at and s]
    assert [x[:3] for x in Trie(seqs, region).decisions(i, coarse)] == want


def test_region_and_code_in_one_token():
    events, _, _ = find('word', ['A1', 'A2', 'B1'], ' A1\nFinal codes: A1')
    assert [(e['phase'], e['merged']) for e in events] == [('coarse', False), ('fine', False)]
    events, _, _ = find('word', ['A1', 'B1'], ' A1\nFinal codes: A1')
    assert [(e['phase'], e['merged']) for e in events] == [('coarse', True)]


def test_a_region_of_several_tokens():
    codes = ['E11.9', 'E11.65', 'E10.9', 'I10']
    text = ' E11.9\nFinal codes: E11.9'
    first, settling = find('word', codes, text)[0], find('word', codes, text, coarse='settling')[0]
    assert text[first[0]['start']:first[0]['end']] == 'E' and text[settling[0]['start']:].startswith('1.9')


def test_three_hundred_thousand_labels_in_seconds():
    import time
    rng = np.random.default_rng(0)
    seqs = np.unique(rng.integers(0, 50, (300_000, 6)), axis=0)
    began = time.time()
    trie = Trie(seqs.tolist(), seqs[:, 0])
    for i in range(0, len(seqs), len(seqs) // 20):
        assert trie.decisions(i)
    assert time.time() - began < 10


class ZeroWidth:
    """A tokenizer whose offsets have zero width, as some byte-level ones shipped."""

    def __init__(self, tok, lossy=False):
        self.tok, self.lossy = tok, lossy

    def __call__(self, texts, **kw):
        out = self.tok(texts, **kw)
        if 'offset_mapping' in out:
            out['offset_mapping'] = [[(s, s) for s, _ in o] for o in out['offset_mapping']]
        return out

    def decode(self, ids, **kw):
        text = self.tok.decode(ids, **kw)
        return text.replace(' ', '') if self.lossy else text


@pytest.mark.parametrize('kind', ['word', 'bytes'])
def test_zero_width_offsets_fall_back_to_decoding(kind):
    text, tok = ' the “quoted” naïve word (code: E11.9)', tokenizer(kind)
    (ids, good), = spans(tok, [text])
    (again, offs), = spans(ZeroWidth(tok), [text])
    assert again == ids and offs[-1][1] == len(text)
    if kind == 'word':
        assert offs == good
    code = text.index('E11.9')
    cover = lambda o: [i for i, (s, e) in enumerate(o) if s < code + 5 and e > code]
    assert cover(offs) == cover(good)
    with pytest.raises(Fault, match='offsets'):
        spans(ZeroWidth(tok, lossy=True), [text])


def test_no_second_bos():                                     # fault 20
    tok = tokenizer('bytes')
    from tokenizers.processors import TemplateProcessing
    tok.backend_tokenizer.post_processor = TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    tok.chat_template = "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    t = task(['E11.9', 'I10'])
    plain, chat = Encoder(tok, t), Encoder(tok, t, chat=True)
    assert plain.prefix[0] == 1 and plain.prefix.count(1) == 1 and chat.prefix[0] == 1 and chat.prefix.count(1) == 1
    assert tok.decode(chat.note({'text': 'x'})).endswith('</user><assistant>') and chat.front == 0 and plain.front == 1


@pytest.mark.parametrize('kind', KINDS)
def test_a_folder_gives_the_tokenizer_it_holds(kind, tmp_path):
    """AutoTokenizer rebuilds the tokenizer of a Qwen2 folder as Qwen2's own; a generic tokenizer.json must be kept."""
    from common import load_tokenizer
    tok = tokenizer(kind)
    tok.save_pretrained(tmp_path)
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}))
    assert load_tokenizer(str(tmp_path))(TEXT[0])['input_ids'] == tok(TEXT[0])['input_ids']


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('text', ['List\nnotes E11.9\nword E11.65\nnaïve I10', 'List\n notes E11.9 word E11.65 naïve I10', 'List\nE11.9 notes E11.65 word I10 naïve'])
def test_entries_of_the_list_belong_to_their_region(kind, text):
    """One entry a line, entries in a row with the words first, and with the code first: each entry's tokens, no others."""
    t = task(['E11.9', 'E11.65', 'I10'])
    t.prompt['prefix'] = text
    enc = Encoder(tokenizer(kind), t)
    got, (ids, offs) = list_regions(enc)[enc.front:], spans(enc.tok, [text])[0]
    assert len(got) == len(ids) and (list_regions(enc)[:enc.front] == -1).all()
    for region, words in ((t.region[0], ('notes E11.9', 'word E11.65', 'E11.9 notes', 'E11.65 word')), (t.region[2], ('naïve I10', 'I10 naïve'))):
        want = [(text.find(w), text.find(w) + len(w)) for w in words if w in text]
        for r, (s, e) in zip(got, offs):
            inside = [a < e and b > s and text[max(s, a):min(e, b)].strip() for a, b in want]
            assert not any(inside) or r == region
        assert sum(any(a < e and b > s for a, b in want) for s, e in offs) >= (got == region).sum() - 1      # at most a white space more
    assert got[0] == -1


@pytest.mark.parametrize('kind', KINDS)
def test_spans_that_heads_read(kind):
    """The near-miss's earlier mentions and as many tokens of other codes' mentions, nearest to them, never the code's own."""
    t = task(['E11.9', 'E11.65', 'I10', 'I11.0'])
    t.prompt['before_note'] = 'notes '
    enc, note, text = Encoder(tokenizer(kind), t), {'text': 'not word'}, 'I10 word E11.65 but not E11.9\nFinal codes: E11.9 I10'
    first = len(enc.prefix) + len(enc.note(note))
    events, _ = EventFinder(enc)('n', {'id': 'n', 'completion': text, 'codes': ['E11.9', 'I10'], 'truncated': False}, first)
    ids, offs = enc.completion(text)
    x = reading_spans(enc, list_regions(enc), note, text, events, first + len(ids)).numpy()
    e = next(i for i, e in enumerate(events) if e['phase'] == 'contrast')
    covered = lambda mask: ''.join(text[s:e] for m, (s, e) in zip(mask[first:], offs) if m)
    near, other = x[e, 3], x[e, 4]
    assert not (near & other).any() and not x[e, 3:, :first].any() and not x[e, 3:, events[e]['query'] + 1:].any()
    assert near.sum() == other.sum() or not near.any()           # no near-miss span without a control of its size
    if near.any():
        assert covered(near).strip() == 'E11.65' and set(covered(other)) <= set(' I10')
    noted = enc.tok.decode([i for i, m in zip(enc.note(note), x[e, 2, len(enc.prefix):first]) if m])
    assert 'not word' in noted and x[e, 2].sum() <= len(enc.note(note))
    assert not x[[i for i, v in enumerate(events) if v['phase'] != 'contrast'], 3:].any()


@pytest.mark.parametrize('kind', KINDS)
def test_the_early_probe_scores_every_region(kind):
    t = task(['E11.9', 'E11.65', 'I10', 'I11.0', 'K17'])
    sites = EarlySites(EventFinder(Encoder(tokenizer(kind), t)))
    text = ' (code: '
    for c in t.codes:
        ids, offs = spans(tokenizer(kind), [text + c])[0]
        target, own, foils = sites.decision(c)
        assert ids[:len(sites.ids)] == sites.ids and ids[len(sites.ids)] == target
        assert target in own and not set(own) & set(foils) and set(own) | set(foils) == set(sites.tokens)
