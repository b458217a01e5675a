"""knockin.py - knock-in between notes: a donor's head outputs are put into another note's decision of the same phase.

    python knockin.py --work W --model M         # after characterize.py

For z_src[l,h] of the heads of S_p copied into a recipient whose target differs, with d = logit[y_src] - logit[y_rec]:
recovery = sum(d_patched - d_rec) / sum(d_src - d_rec), d_src read in the donor's own run. Controls: random sets of the same
size and layer histogram with the same donor, and a same-answer source (its target is the recipient's own), which must move
d by next to nothing. Writes WORK/runs/NAME/knockin.jsonl, one record a (source event, recipient event, set).
"""
import numpy as np
import torch

from common import (Fault, PHASES, at_least, common_args, each_note, finish, head_mask, knockin_summary, load_heads, measure, open_run, prefix_kv,
                    random_sets, rank, silent, write_jsonl)


def choose(events, e, donors, seed):
    """(donor events with another target, same-answer events), drawn from other notes: up to `donors` of each."""
    rng = np.random.default_rng((seed, e['event']))
    pool = [x for x in events if x['phase'] == e['phase'] and x['id'] != e['id'] and x['margin'] > 0]
    draw = lambda xs: [xs[i] for i in rng.permutation(len(xs))[:donors]]
    return draw([x for x in pool if x['target'] != e['target']]), draw([x for x in pool if x['target'] == e['target']])


def main():
    p = common_args(__doc__)
    p.add_argument('--split', default='test', help='split that recipients and donors come from')
    p.add_argument('--donors', type=at_least(1), default=1, help='donors of each recipient')
    p.add_argument('--controls', type=at_least(0), default=200, help='random sets a recipient')
    p.add_argument('--size', type=at_least(0), default=0, help='knock in the top SIZE heads of each phase in place of the selected set')
    args = p.parse_args()
    opened = open_run(args, 'knockin', ('split', 'donors', 'controls', 'size'))
    if not opened:
        return
    task, run, model, enc, traces, events, tensors = opened
    z, logits, column = tensors['z'], tensors['logits'], {t: i for i, t in enumerate(tensors['tokens'].tolist())}
    sets, test = load_heads(run, args.size), set(task.ids(args.split))
    L, H, _ = model.probe_shape
    own, controls = {}, {}
    for ph in PHASES:
        if sets[ph]:
            own[ph] = head_mask(sets[ph], (L, H))[None]
            try:
                controls[ph] = random_sets(sets[ph], args.controls, (L, H), args.seed)[0]
            except Fault:                                         # the set is most of the model: no control exists
                controls[ph] = np.zeros((0, L, H), bool)
    pool, mine = [e for e in events if e['id'] in test], {}
    for e in pool:
        if e['phase'] in own and e['margin'] > 0:
            donors, same = choose(pool, e, args.donors, args.seed)
            if donors:
                mine.setdefault(e['id'], []).append((e, donors, same))
    prefix, P = prefix_kv(model, enc), len(enc.prefix)

    def work(i):
        ids = enc.whole(task.notes[i], traces[i]['completion'])
        probe = silent(model, ids[P:], prefix)
        masks, source, event, pair = [], [], [], []
        for j, (e, donors, same) in enumerate(mine[i]):
            for s, kind in [*((d, 'donor') for d in donors), *((d, 'same') for d in same)]:
                m = np.concatenate([own[e['phase']], controls[e['phase']]]) if kind == 'donor' else own[e['phase']]
                masks.append(m)
                source += [s['event']] * len(m)
                event += [j] * len(m)
                pair += [(donors[0]['target'] if kind == 'same' else s['target'], e['target'])] * len(m)
        bank_of, index = np.unique(source, return_inverse=True)
        value, null = measure(model, [*prefix, probe.kv], ids, [e for e, _, _ in mine[i]], event, pair=torch.tensor(pair), rows=args.rows,
                              edit=(torch.tensor(np.concatenate(masks)), z[bank_of], torch.tensor(index)))
        return {'value': value, 'null': null}
    parts = each_note(run, 'knockin', list(mine), work)
    if rank() > 0:
        return

    records = []
    for i, todo in mine.items():
        value, null, at = parts[i]['value'].tolist(), parts[i]['null'].tolist(), 0
        for e, donors, same in todo:
            for s, kind in [*((d, 'donor') for d in donors), *((d, 'same') for d in same)]:
                n = 1 + (len(controls[e['phase']]) if kind == 'donor' else 0)
                y = donors[0]['target'] if kind == 'same' else s['target']
                d_src = float(logits[s['event'], column[y]] - logits[s['event'], column[e['target']]])
                records.append({'source': s['event'], 'recipient': e['event'], 'id': i, 'phase': e['phase'], 'set': 'selected' if kind == 'donor' else 'same-answer',
                                'size': len(sets[e['phase']]), 'd_rec': null[at], 'd_src': d_src, 'd_patched': value[at], 'controls': value[at + 1:at + n]})
                at += n
    write_jsonl(run / 'knockin.jsonl', records)
    finish(run, 'knockin')

    print(f'{"phase":9} {"size":>4} {"pairs":>5}  {"recovery":>22}  controls 95 %  notes above  same-answer / donor')
    for ph in own:
        a = [r for r in records if r['phase'] == ph and r['set'] == 'selected']
        if not a:
            continue
        s = knockin_summary(a, [r for r in records if r['phase'] == ph and r['set'] == 'same-answer'], args.seed)
        show = lambda x: f'{x[0]:.3f} [{x[1]:.3f}, {x[2]:.3f}]' if x[0] is not None else 'near zero'
        print(f'{ph:9} {len(sets[ph]):4} {len(a):5}  {show(s["recovery"]):>22}  {s["control"] if s["control"] is not None else float("nan"):13.3f}  {show(s["pass"])}  {show(s["same"])}')
    if not records:
        print('nothing was selected, so nothing was knocked in')
    print(f'next: python evaluate.py --work {args.work} --model {args.model}')


if __name__ == '__main__':
    main()
