"""ablate.py - exact interventions at the decision events: every head alone, head sets, keep-only, random controls, blocking.

    python ablate.py --work W --model M          # after characterize.py

Writes into WORK/runs/NAME: ablation.safetensors (effect of each head at each event, with the null rows' drift from the
clean pass) and sets.jsonl (one record a set test). Every effect is run, not estimated: one row a counterfactual. The mean
that replaces a head leaves the event's own note out. Sets come from discovery notes; set tests are on --split notes.
A test's kind: necessity, keep-only, curve (keep-only of the top of the ranking, by size), block (what a family reads is hidden
from it), exhaustive (every small subset of all heads), and necessity and keep-only again with zeros, another event's values or the
log-sum-exp margin in place of the mean and the maximum.
"""
import itertools
import math

import numpy as np
import torch

from common import (NEAR, REGION, EarlySites, EventFinder, Fault, at_least, attribution, by_note, common_args, each_note, finish, head_mask, list_regions, load_heads, loo_means,
                    mean_interval, measure, open_run, prefix_kv, random_sets, rank, ratio_interval, read_jsonl, reading_spans, silent, wilson, write_jsonl,
                    write_tensors)
from safetensors.torch import load_file

CURVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)      # set sizes whose keep-only recovery is measured
BAND = 20                                               # random sets of each of them
FAMILY = {'region reader': ('coarse', REGION), 'look-back': ('contrast', NEAR)}      # phase, and what it reads


def tests_of(sets, tops, phases, controls, shape, seed):
    """The set tests of an event of each phase: {phase: (masks (n,L,H) bool of what is ablated, names)}. Names are
    (kind, set's phase, size, number of the control or -1). sets: {phase: heads}; tops: {size: {phase: heads}}."""
    out, flags = {}, {}

    def controlled(kinds, heads, s, n):
        try:
            rand, flags[s] = random_sets(heads, n, shape, seed)
        except Fault:                                             # the set is most of the model: no control exists
            rand, flags[s] = np.zeros((0, *shape), bool), None
        for i, m in enumerate([head_mask(heads, shape), *rand]):
            for kind in kinds:
                masks.append(m if kind == 'necessity' else ~m), names.append((kind, s, len(heads), i - 1))
    for p in phases:
        masks, names = [np.ones(shape, bool)], [('all', None, 0, -1)]
        for k, top in tops.items():
            if len(top.get(p, ())) == k and k <= shape[0] * shape[1] // 2:
                controlled(['curve'], top[p], p, BAND)
        for s in sets:
            if not sets[s] or 'early' in (s, p) and s != p:
                continue
            if s == p:
                controlled(['necessity', 'keep-only'], sets[s], s, controls)
            else:
                masks.append(head_mask(sets[s], shape)), names.append(('necessity', s, len(sets[s]), -1))
        out[p] = (torch.tensor(np.stack(masks)), names)
    return out, flags


def record(rows, names, ph, split, seed, drift=0.0, flags=None):
    """Set records of one phase. rows: [(note, clean margin, margins (n,) of the masks that `names` name, the first: all
    heads)]. Every test is a ratio of sums over notes, each control the same ratio; notes are resampled, not events."""
    who, m_clean, m = [r[0] for r in rows], np.array([r[1] for r in rows], float), np.stack([r[2] for r in rows])
    note_ids, den, count = by_note(m_clean - m[:, 0], who)
    for n, (kind, s, size, number) in enumerate(names):
        if number >= 0 or kind == 'all':
            continue
        gain = lambda k: by_note(m_clean - m[:, k] if kind.startswith('necessity') else m[:, k] - m[:, 0], who)[1]
        control = [k for k, x in enumerate(names) if x[:3] == (kind, s, size) and x[3] >= 0]
        mine, rand = gain(n), np.stack([gain(k) for k in control], 1) if control else np.zeros((len(den), 0))
        value, low, high = ratio_interval(mine, den, seed)
        drop = mean_interval(mine / count, seed)
        out = {'kind': kind, 'set': s, 'phase': ph, 'split': split, 'size': size, 'value': value, 'low': low, 'high': high, 'n': len(den),
               'drop': drop[0], 'drop_low': drop[1], 'drop_high': drop[2], 'flips': float((m[:, n] <= 0).mean()), 'denominator': float(den.sum()),
               'drift': drift, 'measurable': abs(drop[0]) > drift,        # an effect below the null rows' drift is not an effect
               'layers_matched': (flags or {}).get(s), 'controls': [] if value is None else (rand.sum(0) / den.sum()).tolist(),
               'notes': {str(i): float(x) for i, x in zip(note_ids, mine / count)}}
        if control:
            edge = np.percentile(rand, 95, axis=1)
            out['pass'], out['pass_low'], out['pass_high'] = wilson((mine > edge).sum(), len(den))
            out['edge'] = {str(i): float(x) for i, x in zip(note_ids, edge / count)}
        yield out


def matched_span(attention, span, query, seed):
    """(T,) bool: a random span of as many tokens before `query`, outside `span`, whose mass of attention (T,) is as near to
    the span's as tokens outside it allow: among windows of the tokens sorted by attention, the nearest; half of it drawn."""
    n, rng = int(span.sum()), np.random.default_rng(seed)
    free = np.flatnonzero(~span[:query])
    free = free[np.argsort(attention[free], kind='stable')]
    out = np.zeros(len(span), bool)
    if len(free) <= n:
        out[free] = True
        return out
    mass = np.concatenate([[0], np.cumsum(attention[free])])
    at = int(np.abs(mass[n:] - mass[:-n] - attention[span].sum()).argmin())
    wide = free[max(0, at - n // 2):at + n + n // 2]
    pick = [rng.choice(wide, n, replace=False) for _ in range(20)]
    out[min(pick, key=lambda x: abs(attention[x].sum() - attention[span].sum()))] = True
    return out


def subsets(heads, most=40_000):
    """Every subset of range(heads) of up to k heads, the smallest first, for the largest k with no more than `most` of them."""
    counts = itertools.takewhile(lambda n: n <= most, itertools.accumulate(math.comb(heads, k) for k in range(heads + 1)))
    return [c for k, _ in enumerate(counts) for c in itertools.combinations(range(heads), k)]


def main():
    p = common_args(__doc__)
    p.add_argument('--split', default='test', help='split on which the sets are tested')
    p.add_argument('--controls', type=at_least(0), default=200, help='random sets of the same size and layer histogram')
    p.add_argument('--size', type=at_least(0), default=0, help='test the top SIZE heads of each phase in place of the selected set (equal sizes across models)')
    p.add_argument('--robust', default='auto', choices=('auto', 'on', 'off'), help='also zeros, resampled values, log-sum-exp, integrated gradients; auto: below 500 M parameters')
    p.add_argument('--exhaustive', type=at_least(0), default=0, help='events of each phase on which every small subset of heads is kept alone (up to 4 of 24 heads, 2 of 270, all of 12)')
    args = p.parse_args()
    opened = open_run(args, 'ablate', ('split', 'controls', 'size', 'robust', 'exhaustive'))
    if not opened:
        return
    task, run, model, enc, traces, events, tensors = opened
    robust = args.robust == 'on' or args.robust == 'auto' and sum(w.numel() for w in model.parameters()) < 5e8
    shape = L, H = model.probe_shape[:2]
    discovery, test = set(task.ids('discovery')), set(task.ids(args.split))
    z, (mean_of, phases) = tensors['z'], loo_means(tensors['z'], events, discovery)
    asked, early = [r for _, r in read_jsonl(run / 'early_sites.jsonl')], load_file(run / 'early.safetensors')
    early_mean, early_phase = loo_means(early['z'], asked, discovery, ('early',))
    sets = load_heads(run, args.size) | {'early': [(r['layer'], r['head']) for _, r in read_jsonl(run / 'early_heads.jsonl') if r['selected']]}
    family = {k: [(r['layer'], r['head']) for _, r in read_jsonl(run / 'families.jsonl') if r['family'] == k] for k in FAMILY}
    sites, mine = EarlySites(EventFinder(enc)) if asked else None, {}
    for e in events + (asked if early_phase and sets['early'] else []):
        if e['phase'] in (*phases, 'early'):
            mine.setdefault(e['id'], ([], []))[e['phase'] == 'early'].append(e)
    prefix, P, regions = prefix_kv(model, enc), len(enc.prefix), list_regions(enc)
    plans, matched = tests_of(sets, {k: load_heads(run, k) for k in CURVE}, [*phases, *early_phase], args.controls, shape, args.seed)
    positive = {p: [e for e in events if e['phase'] == p and e['margin'] > 0 and e['id'] in discovery] for p in phases}
    small = subsets(L * H) if args.exhaustive else []
    every = torch.ones(len(small), L * H, dtype=torch.bool)
    for m, c in zip(every, small):
        m[list(c)] = False
    every = every.view(-1, L, H)
    truth = {e['event'] for p in phases for e in [e for e in events if e['phase'] == p and e['margin'] > 0 and e['id'] in test][:args.exhaustive]}

    def work(i):
        ev, at_early = mine[i]
        ids = enc.whole(task.notes[i], traces[i]['completion'])
        E, base = len(ev), silent(model, ids[P:], prefix)
        past, out = [*prefix, base.kv], {'clean': torch.zeros(E), 'effect': torch.zeros(E, L, H)}

        def run_rows(ev, masks, bank, past=past, ids=ids, how=args.margin):       # masks[j] (n,L,H): what is ablated at ev[j]
            event = torch.tensor([j for j, m in enumerate(masks) for _ in m])
            return measure(model, past, ids, ev, event, (torch.cat(masks), bank, event), rows=args.rows, how=how)
        if ev:
            bank = torch.stack([mean_of(i, e['phase']) for e in ev])
            single = torch.eye(L * H, dtype=torch.bool).view(-1, L, H)
            masks = [torch.cat([single, plans[e['phase']][0]]) if i in test else single for e in ev]
            masks = [torch.cat([m, every]) if e['event'] in truth else m for m, e in zip(masks, ev)]
            value, null = run_rows(ev, masks, bank)
            for j, (v, n) in enumerate(zip(value.split([len(m) for m in masks]), null.split([len(m) for m in masks]))):
                out['clean'][j], out['effect'][j] = n[0], (n - v)[:L * H].view(L, H)
                out[f'sets.{j}'] = v[L * H:len(v) - len(every) * (ev[j]['event'] in truth)]
                if ev[j]['event'] in truth:
                    out[f'truth.{j}'] = v[-len(every):]
        if i in test and robust and ev:
            full = torch.ones(1, L, H, dtype=torch.bool)
            masks = [torch.cat([full, m, ~m]) for e in ev for m in [torch.tensor(head_mask(sets[e['phase']], shape) if sets[e['phase']] else np.zeros(shape, bool))[None]]]
            other = [[x for x in positive[e['phase']] if x['id'] != i] for e in ev]
            drawn = [x[int(np.random.default_rng((args.seed, e['event'])).integers(len(x)))]['event'] if x else e['event'] for e, x in zip(ev, other)]
            for name, b, how in (('zero', torch.zeros_like(bank), args.margin), ('resample', z[drawn], args.margin), ('lse', bank, 'lse')):
                value, null = run_rows(ev, masks, b, how=how)
                out[f'robust.{name}'] = torch.cat([null.view(E, 3)[:, :1], value.view(E, 3)], 1)
            out['ig'] = attribution(model, past, ids, ev, z[[e['event'] for e in ev]], bank, 8, args.margin)
        for kind, heads in family.items() if i in test else ():
            here = [e for e in ev if e['phase'] == FAMILY[kind][0] and e['margin'] > 0]
            span = reading_spans(enc, regions, task.notes[i], traces[i]['completion'], here, len(ids))[:, FAMILY[kind][1]].numpy() if here else np.zeros((0, 0), bool)
            here, span = [e for e, s in zip(here, span) if s.any()], span[span.any(1)] if len(span) else span
            if not heads or not here:
                continue
            q = torch.tensor([e['query'] - P for e in here])
            probe = silent(model, ids[P:], prefix, keep_kv=False, attn_at=(torch.zeros_like(q), q), attn_layers={l for l, _ in heads})
            look = (sum(probe.attn[l][:, h] for l, h in heads) / len(heads)).double().cpu().numpy()
            control = np.stack([matched_span(a, s, e['query'], (args.seed, e['event'])) for a, s, e in zip(look, span, here)])
            mask = torch.tensor(head_mask(heads, shape)).expand(len(here) * 4, L, H)
            event = torch.arange(len(here)).repeat_interleave(4)                              # ablate, block, both, block the control
            keys = torch.from_numpy(np.stack([x for s, c in zip(span, control) for x in (s, s, s, c)]))
            edit, hide = (torch.tensor(x).repeat(len(here))[:, None, None] & mask for x in ([True, False, True, False], [False, True, True, True]))
            value, null = measure(model, past, ids, here, event, (edit, torch.stack([mean_of(i, e['phase']) for e in here]), event), (hide, keys), args.rows, args.margin)
            mass = torch.from_numpy(np.stack([(look * span).sum(1), (look * control).sum(1)], 1)).float()
            out[f'block.{kind}'] = torch.cat([(null - value).view(-1, 4), mass], 1)
        if i in test and at_early:
            bank, masks = early_mean(i, 'early')[None], [plans['early'][0]]
            for j, e in enumerate(at_early):
                seq, segments, _ = sites.site(model, prefix, base.kv, ids, e['cut'])
                value, null = run_rows([e], masks, bank, past=segments, ids=seq)
                out[f'early.{j}'] = torch.cat([null[:1], value])
        return out
    parts = each_note(run, 'ablate', list(mine), work)
    if rank() > 0:
        return

    # ---- single heads
    E = len(events)
    effect, ig, clean, drift = torch.full((E, L, H), torch.nan), torch.full((E, L, H), torch.nan), torch.full((E,), torch.nan), torch.full((E,), torch.nan)
    for i, (ev, _) in mine.items():
        for j, e in enumerate(ev):
            effect[e['event']], clean[e['event']] = parts[i]['effect'][j], parts[i]['clean'][j]
            drift[e['event']] = abs(clean[e['event']] - e['margin'])
            if 'ig' in parts[i]:
                ig[e['event']] = parts[i]['ig'][j]
    write_tensors(run / 'ablation.safetensors', {'effect': effect, 'clean': clean, 'drift': drift, **({'attribution_ig': ig} if robust else {})})

    # ---- sets
    records, tested = [], {p: [(i, j, e) for i, (ev, _) in mine.items() if i in test for j, e in enumerate(ev) if e['phase'] == p and e['margin'] > 0] for p in phases}
    for ph in phases:
        if not tested[ph]:
            continue
        noise = float(np.mean([drift[e['event']] for *_, e in tested[ph]]))
        records += record([(i, float(parts[i]['clean'][j]), parts[i][f'sets.{j}'].numpy()) for i, j, _ in tested[ph]], plans[ph][1], ph, args.split, args.seed, noise, matched)
        for name in ('zero', 'resample', 'lse') if robust and sets[ph] else ():
            names = [('all', None, 0, -1)] + [(f'{kind} ({name})', ph, len(sets[ph]), -1) for kind in ('necessity', 'keep-only')]
            records += record([(i, float(x[0]), x[1:].numpy()) for i, j, _ in tested[ph] for x in [parts[i][f'robust.{name}'][j]]], names, ph, args.split, args.seed, noise)
        some = [(i, j) for i, j, e in tested[ph] if e['event'] in truth]
        if some:
            gain = sum(parts[i][f'truth.{j}'] - parts[i][f'sets.{j}'][0] for i, j in some).numpy()
            share = gain / float(sum(parts[i]['clean'][j] - parts[i][f'sets.{j}'][0] for i, j in some))
            best = next(((k, c) for k in range(1, len(small[-1]) + 1) for c in [max((c for c in range(len(small)) if len(small[c]) == k), key=lambda c: share[c])] if share[c] >= 0.8), None)
            own = [l * H + h for l, h in sets[ph]]
            kept = next((float(x) for c, x in zip(small, share) if sorted(own) == list(c)), None)
            records.append({'kind': 'exhaustive', 'set': ph, 'phase': ph, 'split': args.split, 'size': best[0] if best else None, 'value': float(share[best[1]]) if best else None,
                            'low': None, 'high': None, 'n': len({i for i, _ in some}), 'events': len(some), 'subsets': len(small), 'selected_size': len(own), 'selected_recovery': kept,
                            'heads': [f'{h // H}.{h % H}' for h in small[best[1]]] if best else [], 'reason': None if best else f'no subset of up to {len(small[-1])} heads recovers 80 %'})
    site_rows = [(i, x[0], x[1:].numpy()) for i, (_, at_early) in mine.items() if i in test for j, e in enumerate(at_early) if e['margin'] > 0 for x in [parts[i][f'early.{j}']]]
    if site_rows:
        records += record(site_rows, plans['early'][1], 'early', args.split, args.seed, 0.0, matched)
    for kind, heads in family.items():
        x = [(i, r) for i in mine if f'block.{kind}' in parts[i] for r in parts[i][f'block.{kind}'].double().numpy()]
        if x:
            s = by_note([r for _, r in x], [i for i, _ in x])[1]
            for what, num in (('block', s[:, 1]), ('residual', s[:, 2] - s[:, 1]), ('random span', s[:, 3])):
                value, low, high = ratio_interval(num, s[:, 0], args.seed)
                records.append({'kind': what, 'set': kind, 'phase': FAMILY[kind][0], 'split': args.split, 'size': len(heads), 'value': value, 'low': low, 'high': high, 'n': len(s),
                                'ablation': float(s[:, 0].sum() / len(x)), 'mass': float(np.mean([r[4] for _, r in x])), 'control_mass': float(np.mean([r[5] for _, r in x]))})
    write_jsonl(run / 'sets.jsonl', records)
    finish(run, 'ablate')

    print(f'{E} events x {L * H} heads; largest drift of a null row from the clean pass: {np.nanmax(drift.numpy()) if E else 0:.1e}')
    print(f'{"test":22} {"set":13} {"phase":9} {"size":>4}  {"value":>24}  {"drop":>6} {"flips":>6}  controls 95 %  notes above')
    for r in records:
        if r['kind'] == 'curve':
            continue
        c = r.get('controls')
        value = f'{r["value"]:.3f} [{r["low"]:.3f}, {r["high"]:.3f}]' if r['low'] is not None else f'{r["value"]:.3f}' if r['value'] is not None else r.get('reason', 'denominator near zero')
        more = f'{r["drop"]:6.2f} {r["flips"]:6.2f}' if 'drop' in r else f'selected: {r["selected_size"]}' if r['kind'] == 'exhaustive' else f'attention {r["mass"]:.2f}, control {r["control_mass"]:.2f}'
        print(f'{r["kind"]:22} {r["set"]:13} {r["phase"]:9} {r["size"] or 0:4}  {value:>24}  {more}  '
              + (f'{np.percentile(c, 95):13.3f}  {r["pass"]:.2f}' if c else '') + ('' if r.get('measurable', True) else '  not measurable: below the drift'))
    if not any(r['kind'] == 'necessity' for r in records):
        print('nothing was selected, so no set was tested')
    print(f'next: python knockin.py --work {args.work} --model {args.model}')


if __name__ == '__main__':
    main()
