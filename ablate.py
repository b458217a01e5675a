"""ablate.py - exact interventions at the decision events: every head alone, head sets, keep-only, random controls.

    python ablate.py --work W --model M          # after characterize.py

Writes into WORK/runs/NAME: ablation.safetensors (effect of each head at each event, with the null rows' drift from the
clean pass) and sets.jsonl (one record a set test). Every effect is run, not estimated: one row a counterfactual. The mean
that replaces a head leaves the event's own note out. Sets come from discovery notes; set tests are on --split notes.
"""
import numpy as np
import torch

from common import (Fault, PHASES, by_note, common_args, each_note, finish, head_mask, load_heads, loo_means, mean_interval, measure,
                    open_run, prefix_kv, random_sets, rank, ratio_interval, silent, wilson, write_jsonl, write_tensors)


def tests_of(sets, phases, controls, shape, seed):
    """The set tests of an event of each phase: {phase: (masks (n,L,H) bool of what is ablated, names)}. Names are
    (kind, set's phase, number of the control or -1)."""
    L, H = shape
    out, flags = {}, {}
    for p in phases:
        masks, names = [np.ones((L, H), bool)], [('all', None, -1)]
        for s in PHASES:
            if not sets[s]:
                continue
            m = head_mask(sets[s], shape)
            masks.append(m), names.append(('necessity', s, -1))
            if s != p:
                continue
            masks.append(~m), names.append(('keep-only', s, -1))
            try:
                rand, flags[s] = random_sets(sets[s], controls, shape, seed)
            except Fault:                                         # the set is most of the model: no control exists
                rand, flags[s] = np.zeros((0, L, H), bool), None
            for i, r in enumerate(rand):
                masks += [r, ~r]
                names += [('necessity', s, i), ('keep-only', s, i)]
        out[p] = (torch.tensor(np.stack(masks)), names)
    return out, flags


def main():
    p = common_args(__doc__)
    p.add_argument('--split', default='test', help='split on which the sets are tested')
    p.add_argument('--controls', type=int, default=100, help='random sets of the same size and layer histogram')
    p.add_argument('--size', type=int, default=0, help='test the top SIZE heads of each phase in place of the selected set (equal sizes across models)')
    args = p.parse_args()
    opened = open_run(args, 'ablate', ('split', 'controls', 'size'))
    if not opened:
        return
    task, run, model, enc, traces, events, tensors = opened
    sets, shape = load_heads(run, args.size), model.probe_shape[:2]
    L, H = shape
    discovery, test = set(task.ids('discovery')), set(task.ids(args.split))
    mean_of, phases = loo_means(tensors['z'], events, discovery)
    mine = {}
    for e in events:
        if e['phase'] in phases:
            mine.setdefault(e['id'], []).append(e)
    prefix, P = prefix_kv(model, enc), len(enc.prefix)
    plans, matched = tests_of(sets, phases, args.controls, shape, args.seed)

    def work(i):
        ev = mine[i]
        ids = enc.prefix + enc.note(task.notes[i]) + enc.completion(traces[i]['completion'])[0]
        probe = silent(model, ids[P:], prefix)
        bank = torch.stack([mean_of(i, e['phase']) for e in ev])
        masks = [torch.eye(L * H, dtype=torch.bool).view(-1, L, H)] * len(ev)
        if i in test:
            masks = [torch.cat([m, plans[e['phase']][0]]) for m, e in zip(masks, ev)]
        event = torch.tensor([j for j, m in enumerate(masks) for _ in range(len(m))])
        value, null = measure(model, [*prefix, probe.kv], ids, ev, event, (torch.cat(masks), bank, event), rows=args.rows, how=args.margin)
        out = {'clean': torch.zeros(len(ev)), 'effect': torch.zeros(len(ev), L, H)}
        for j in range(len(ev)):
            at = event == j
            out['clean'][j] = null[at][0]
            out['effect'][j] = (null - value)[at][:L * H].view(L, H)
            out[f'sets.{j}'] = value[at][L * H:]
        return out
    parts = each_note(run, 'ablate', list(mine), work)
    if rank() > 0:
        return

    # ---- single heads
    E = len(events)
    effect, clean, drift = torch.full((E, L, H), torch.nan), torch.full((E,), torch.nan), torch.full((E,), torch.nan)
    for i, ev in mine.items():
        for j, e in enumerate(ev):
            effect[e['event']], clean[e['event']] = parts[i]['effect'][j], parts[i]['clean'][j]
            drift[e['event']] = abs(clean[e['event']] - e['margin'])
    write_tensors(run / 'ablation.safetensors', {'effect': effect, 'clean': clean, 'drift': drift})

    # ---- sets: every test is a ratio of sums over notes, each control the same ratio; notes are resampled, not events
    records = []
    for ph in phases:
        names = plans[ph][1]
        rows = [(i, float(parts[i]['clean'][j]), parts[i][f'sets.{j}'].numpy(), float(drift[e['event']])) for i, ev in mine.items() if i in test
                for j, e in enumerate(ev) if e['phase'] == ph and e['margin'] > 0]
        if not rows:
            continue
        who, m_clean, m = [r[0] for r in rows], np.array([r[1] for r in rows]), np.stack([r[2] for r in rows])
        noise = float(np.mean([r[3] for r in rows]))              # an effect below the null rows' drift is not an effect
        note_ids, den, count = by_note(m_clean - m[:, 0], who)
        for n, (kind, s, number) in enumerate(names):
            if number >= 0 or kind == 'all':
                continue
            gain = lambda k: by_note(m_clean - m[:, k] if kind == 'necessity' else m[:, k] - m[:, 0], who)[1]
            control = [k for k, x in enumerate(names) if x[:2] == (kind, s) and x[2] >= 0]
            mine_gain, rand = gain(n), np.stack([gain(k) for k in control], 1) if control else np.zeros((len(den), 0))
            value, low, high = ratio_interval(mine_gain, den, args.seed)
            drop = mean_interval(mine_gain / count, args.seed)
            record = {'kind': kind, 'set': s, 'phase': ph, 'split': args.split, 'size': len(sets[s]), 'value': value, 'low': low, 'high': high, 'n': len(den),
                      'drop': drop[0], 'drop_low': drop[1], 'drop_high': drop[2], 'flips': float((m[:, n] <= 0).mean()), 'denominator': float(den.sum()), 'drift': noise, 'measurable': abs(drop[0]) > noise,
                      'layers_matched': matched.get(s), 'controls': [] if value is None else (rand.sum(0) / den.sum()).tolist(),
                      'notes': {str(i): float(x) for i, x in zip(note_ids, mine_gain / count)}}
            if control:
                beat = (mine_gain > np.percentile(rand, 95, axis=1))
                record['pass'], record['pass_low'], record['pass_high'] = wilson(beat.sum(), len(beat))
            records.append(record)
    write_jsonl(run / 'sets.jsonl', records)
    finish(run, 'ablate')

    print(f'{E} events x {L * H} heads; largest drift of a null row from the clean pass: {np.nanmax(drift.numpy()) if E else 0:.1e}')
    print(f'{"test":10} {"set":9} {"phase":9} {"size":>4}  {"value":>24}  {"drop":>6} {"flips":>6}  controls 95 %  notes above')
    for r in records:
        c = r['controls']
        value = f'{r["value"]:.3f} [{r["low"]:.3f}, {r["high"]:.3f}]' if r['value'] is not None else 'denominator near zero'
        print(f'{r["kind"]:10} {r["set"]:9} {r["phase"]:9} {r["size"]:4}  {value:>24}  {r["drop"] if r["drop"] is not None else float("nan"):6.2f} {r["flips"]:6.2f}  '
              f'{np.percentile(c, 95) if c else float("nan"):13.3f}  {r.get("pass", float("nan")):.2f}' + ('' if r['measurable'] else '  not measurable: below the drift'))
    if not records:
        print('nothing was selected, so no set was tested')
    print(f'next: python knockin.py --work {args.work} --model {args.model}')


if __name__ == '__main__':
    main()
