"""BC5CDR: PubMed abstracts with exact disease mentions, as a coding task with its candidate list in the prompt.

    python data/bc5cdr/prepare.py --corpus BC5CDR --work work/bc5cdr

BC5CDR is the folder with the PubTator files train_corpus.txt and dev_corpus.txt and with entities.txt (MeSH id, tab, name).
Labels are the most frequent diseases by number of abstracts; regions are k-means clusters of the TF-IDF of the
abstracts that mention them (scikit-learn), and a label's code is cluster.item (C.4). train_corpus.txt gives the train
split, dev_corpus.txt discovery, test and dev. gold.jsonl is written from the gold mentions: the quoted words, for every
second code a near-miss of its region, the code, then the final codes. It is there to make a reasoner out of a language model.
"""
import argparse
import collections
import json
import pathlib
import random
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from common import Fault, at_least, private_dir, write_jsonl, write_text  # noqa: E402

PROMPT = {'before_note': '\nAbstract:\n', 'after_note': '\n\nReasoning:\n', 'answer': 'Final codes:'}
INTRO = 'Find the diseases that the abstract mentions and give their codes from this list.\n\nCodes:\n'


def pubtator(path):
    """{id: (text, [(start, end, mention, [mesh ids])])} of the diseases; a mention that is not at its offsets is a Fault."""
    docs, texts = {}, {}
    for n, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
        part = line.split('|', 2)
        if len(part) == 3 and part[1] in 'ta' and part[0].isdigit():
            texts[part[0]] = part[2] if part[1] == 't' else texts[part[0]] + ' ' + part[2]
            docs.setdefault(part[0], [])
            continue
        part = line.split('\t')
        if len(part) >= 6 and part[4] == 'Disease':
            s, e = int(part[1]), int(part[2])
            if texts[part[0]][s:e] != part[3]:
                raise Fault(f'{path}:{n}: {part[3]!r} is not at {s}-{e} of abstract {part[0]}')
            docs[part[0]].append((s, e, part[3], [m for m in re.split(r'[|+]', part[5]) if m != '-1']))
    return {i: (texts[i], m) for i, m in docs.items()}


def clusters(texts, k, seed):
    try:
        from sklearn.cluster import KMeans
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise Fault('data/bc5cdr/prepare.py needs scikit-learn: pip install scikit-learn')
    x = TfidfVectorizer(stop_words='english', sublinear_tf=True, min_df=2).fit_transform(texts)
    return KMeans(k, n_init=10, random_state=seed).fit_predict(x)


def gold_trace(rng, found, names, siblings):
    """found: [(code, quoted words)] in the order of first mention."""
    lines = ''
    for n, (code, words) in enumerate(found):
        near = rng.choice(siblings[code]) if siblings[code] and rng.random() < 0.5 else None
        lines += f'"{words}" (code:' + (f' not {near} {names[near]} but' if near else '') + f' {code})\n'
    return lines + PROMPT['answer'] + ''.join(f' {c}' for c, _ in found)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--corpus', required=True, help='folder with train_corpus.txt, dev_corpus.txt, entities.txt')
    p.add_argument('--work', required=True, help='work directory to write')
    p.add_argument('--labels', type=at_least(1), default=72, help='most frequent diseases taken as candidates')
    p.add_argument('--regions', type=at_least(1, 26), default=12, help='k-means clusters')
    p.add_argument('--discovery', type=at_least(1), default=120, help='notes; of the rest a quarter is dev and three quarters test')
    p.add_argument('--seed', type=int, default=0)
    args = p.parse_args()
    work, corpus = pathlib.Path(args.work), pathlib.Path(args.corpus)
    if (work / 'notes.jsonl').exists():
        return print(f'{work} is there already')
    for name in ('train_corpus.txt', 'dev_corpus.txt', 'entities.txt'):
        if not (corpus / name).is_file():
            raise Fault(f'{corpus / name} is not there: --corpus should be the folder with BC5CDR\'s train_corpus.txt, dev_corpus.txt, entities.txt')
    private_dir(work)
    docs = {s: pubtator(corpus / f'{s}_corpus.txt') for s in ('train', 'dev')}
    every = {**docs['train'], **docs['dev']}
    mesh = dict(line.split('\t', 1) for line in (corpus / 'entities.txt').read_text(encoding='utf-8').splitlines())
    count = collections.Counter(m for i in docs['train'] for m in {m for x in docs['train'][i][1] for m in x[3]})
    top = [m for m, _ in sorted(count.items(), key=lambda x: (-x[1], x[0])) if m in mesh][:args.labels]
    group = clusters([mesh[m] + ' ' + ' '.join(every[i][0] for i in docs['train'] if any(m in x[3] for x in every[i][1])) for m in top], args.regions, args.seed)
    code, size = {}, collections.Counter()
    for m, g in zip(top, group):
        code[m] = f'{"ABCDEFGHIJKLMNOPQRSTUVWXYZ"[g]}.{size[g] + 1}'
        size[g] += 1
    name = {code[m]: mesh[m].lower() for m in top}
    siblings = {c: [x for x in name if x != c and x[0] == c[0]] for c in name}
    notes, traces, rng = [], [], random.Random(args.seed)
    held = 0
    for split, part in docs.items():
        for i, (text, found) in part.items():
            evidence = [{'code': code[m], 'start': s, 'end': e} for s, e, _, ms in found for m in ms if m in code]
            codes = list(dict.fromkeys(e['code'] for e in evidence))
            if not codes:
                continue
            if split == 'train':
                where = 'train'
            else:
                where = 'discovery' if held < args.discovery else 'dev' if held % 4 == 0 else 'test'
                held += 1
            notes.append({'id': i, 'text': text, 'codes': codes, 'split': where, 'evidence': evidence})
            words = {c: next(text[e['start']:e['end']] for e in evidence if e['code'] == c) for c in codes}
            if where == 'train':
                traces.append({'id': i, 'completion': gold_trace(rng, list(words.items()), name, siblings), 'codes': codes, 'truncated': False})
    write_jsonl(work / 'gold.jsonl', traces)
    write_jsonl(work / 'notes.jsonl', notes)
    write_jsonl(work / 'labels.jsonl', [{'code': c, 'text': t, 'region': c[0]} for c, t in sorted(name.items(), key=lambda x: (x[0][0], int(x[0][2:])))])
    prompt = PROMPT | {'prefix': INTRO + ''.join(f'{c} {t}\n' for c, t in sorted(name.items(), key=lambda x: (x[0][0], int(x[0][2:]))))}
    write_text(work / 'prompt.json', json.dumps(prompt, indent=1))
    splits = collections.Counter(n['split'] for n in notes)
    print(f'{work}: {len(name)} codes in {len(size)} regions of {min(size.values())} to {max(size.values())}, notes {dict(splits)}, '
          f'{sum(len(n["codes"]) for n in notes) / len(notes):.1f} codes a note')
    print(f'next: python distill.py --work {work} --student MODEL --traces {work}/gold.jsonl --prefix frozen --name reasoner')


if __name__ == '__main__':
    main()
