"""evaluate.py - what the runs say: claims with intervals, task scores, students side by side; the report and its figures.

    python evaluate.py --work W --model M        # after characterize, ablate, knockin of M and of the students

Reads files only, no model: WORK/runs/*/ and WORK/students/*/manifest.json. Writes WORK/evaluation.jsonl (one or more rows a
claim of METHOD.md; a claim that was not computed says so), WORK/report.md and WORK/figures/*.png. When a claim holds was
fixed before any run (METHOD.md, "When a claim holds"); nothing here is tuned to a result.
"""
import json
import pathlib

import numpy as np

from common import (LIST, NEAR, NOTE, OTHERS, PHASES, REGION, Fault, answer_codes, by_note, common_args, interval, knockin_summary, load_heads, load_task, load_traces,
                    mean_interval, note_means, private_dir, ratio_interval, read_events, read_jsonl, resamples, write_jsonl, write_text)

CLAIMS = {1: 'each decision is a token-level event scored by its own margin', 2: 'null calibration discounts generic heads',
          3: 'attribution points at causal heads', 4: 'the head set is small', 5: 'it is global', 6: 'it is phase-structured', 7: 'it is necessary',
          8: 'it is sufficient', 9: 'families read the region and the near-miss', 10: 'blocking what they read removes their effect',
          11: 'the region can be elicited early', 12: 'a disjoint mid-layer set makes it so', 13: 'the structure recurs in a second reasoner',
          14: 'MISTILL raises contrast recovery in a cross-family student', 15: 'a small seed-stable gain where the student carries most of it',
          16: 'no task difference at matched precision', 17: 'it beats a frozen random-head pool', 18: 'decision heads attend to evidence',
          19: 'evidence flip: no improvement', 20: 'v1 scores'}
COLOURS = {'coarse': '#0072B2', 'fine': '#E69F00', 'contrast': '#009E73'}      # Okabe-Ito: safe for colour-blind readers


def jsonl(path, *fields):
    return [r for _, r in read_jsonl(path, fields)] if path.exists() else []


def scores(task, traces, split):
    """Micro and macro F1 of the traces' final answers on notes of `split`, intervals over notes. A truncated trace is no
    answer: left out and counted. Macro: over labels in gold or prediction, and over all labels (an absent label counts 0)."""
    ids = [i for i in task.ids(split) if i in traces]
    cut = [i for i in ids if traces[i]['truncated']]
    ids = [i for i in ids if not traces[i]['truncated']]
    out = {'n': len(ids), 'truncated': len(cut)}
    if not ids:
        return out
    C = len(task.codes)
    gold, pred = np.zeros((len(ids), C), bool), np.zeros((len(ids), C), bool)
    for n, i in enumerate(ids):
        gold[n, [task.index[c] for c in task.notes[i]['codes']]] = True
        pred[n, [task.index[c] for c in answer_codes(traces[i]['completion'], task)]] = True
    tp, fp, fn = gold & pred, ~gold & pred, gold & ~pred
    per_note = lambda x: x.sum(1).astype(float)
    out['micro'] = ratio_interval(2 * per_note(tp), 2 * per_note(tp) + per_note(fp) + per_note(fn))
    out['precision'] = ratio_interval(per_note(tp), per_note(pred))
    out['recall'] = ratio_interval(per_note(tp), per_note(gold))

    to_region = np.eye(task.region.max() + 1, dtype=bool)[task.region]                        # (codes, regions)
    g, q = (x.astype(int) @ to_region > 0 for x in (gold, pred))
    out['region'] = ratio_interval(2 * per_note(g & q), per_note(g) + per_note(q))
    seen = int((gold | pred).any(0).sum())

    def macro(pick):                                              # labels that a resample leaves out are not counted as wrong
        t, den = tp[pick].sum(0), 2 * tp[pick].sum(0) + fp[pick].sum(0) + fn[pick].sum(0)
        f = 2 * t[den > 0] / den[den > 0]
        return (f.mean(), f.mean() * seen / C) if len(f) else (0.0, 0.0)
    every = [macro(p) for p in resamples(len(ids), 0, 1000)]
    for k, name in enumerate(('macro', 'macro_all_labels')):
        out[name] = (float(macro(np.arange(len(ids)))[k]), *interval([e[k] for e in every], len(ids)))
    out['counts'] = {i: (2.0 * t, 2.0 * t + a + b) for i, t, a, b in zip(ids, per_note(tp), per_note(fp), per_note(fn))}
    return out


def tensor_file(path):
    from safetensors.numpy import load_file
    return load_file(path) if path.exists() else {}


def split_half(run, sets, discovery, seed, draws=200):
    """{phase: (median Jaccard, low, high, random sets' 95th percentile, notes)}: the top |S| heads by calibrated attribution
    in each half of the discovery notes, over random halves (the interval is over halves, so the median lies in it)."""
    events, t = read_events(run)
    L, H = t['attribution'].shape[1:]
    owner, a, null, out = t['null_event'].numpy(), t['attribution'].flatten(1).numpy(), t['null'].flatten(1).numpy(), {}
    rng = np.random.default_rng(seed)
    for p in PHASES:
        k = len(sets[p])
        use = np.array([e['phase'] == p and e['id'] in discovery and e['margin'] > 0 for e in events], bool)
        nuse = use[owner] if len(owner) else np.zeros(0, bool)
        if not k or not nuse.any():
            continue
        ids = np.array([e['id'] for e in events])
        n1, s1, c1 = by_note(a[use], ids[use])
        n2, s2, c2 = by_note(null[nuse], ids[owner][nuse])
        keep = np.isin(n1, n2)
        c = (s1 / c1[:, None])[keep] - s2 / c2[:, None]                                       # (notes, L*H)
        top = lambda x: set(np.argsort(-x.mean(0), kind='stable')[:k])
        jac = lambda x, y: len(x & y) / len(x | y)
        order = [rng.permutation(len(c)) for _ in range(draws)]
        real = [jac(top(c[o[:len(o) // 2]]), top(c[o[len(o) // 2:]])) for o in order] if len(c) > 1 else []
        chance = [jac(set(rng.choice(L * H, k, replace=False)), set(rng.choice(L * H, k, replace=False))) for _ in range(2000)]
        if real:
            low, value, high = np.percentile(real, [2.5, 50, 97.5]).tolist()
            out[p] = (value, low, high, float(np.percentile(chance, 95)), len(c))
    return out


def spearman(x, y):
    """Rank correlation of each row of x (b,n) with the same row of y: (b,)."""
    from scipy.stats import rankdata
    x, y = (r - r.mean(1, keepdims=True) for r in (rankdata(x, axis=1), rankdata(y, axis=1)))
    return (x * y).sum(1) / np.sqrt((x ** 2).sum(1) * (y ** 2).sum(1))


def reasoner_claims(task, run, seed):
    """Rows for claims 1-12 of one run folder."""
    from scipy.stats import hypergeom
    rows = []

    def add(claim, name, x, holds, source, n=0, reason='denominator near zero', **more):
        value, low, high = x if isinstance(x, tuple) else (x, None, None)
        rows.append({'claim': claim, 'name': name, 'model': run.name, 'value': value, 'low': low, 'high': high, 'n': int(n),
                     'holds': None if value is None else holds, 'from': f'runs/{run.name}/{source}', **({'reason': reason} if value is None else {}), **more})

    discovery, test = set(task.ids('discovery')), set(task.ids('test'))
    events, tensors = read_events(run)
    sets, dropped, traces = load_heads(run), jsonl(run / 'dropped.jsonl'), load_traces(run / 'traces.jsonl', task)
    L, H = tensors['attribution'].shape[1:]
    count = {p: sum(e['phase'] == p for e in events) for p in PHASES}
    seen = {(e['id'], e['code']) for e in events} | {(d['id'], d['code']) for d in dropped}
    measured = [i for i in traces if i in discovery | test]
    lost = [(i, c) for i in measured for c in traces[i]['codes'] if c in task.index and (i, c) not in seen]
    add(1, 'events', len(events), all(count.values()) and not lost, 'events.jsonl', len(measured), phases=count, dropped=len(dropped), unaccounted=len(lost))

    heads, used = jsonl(run / 'heads.jsonl'), len({e['id'] for e in events if e['id'] in discovery and e['margin'] > 0})
    if not any(sets.values()):
        for c in range(2, 13):
            add(c, CLAIMS[c], None, None, 'heads.jsonl', reason='not computed: nothing was selected')
        return rows
    fell = {}
    for p in PHASES:
        mine = [h for h in heads if h['phase'] == p and h['attribution'] is not None]
        raw = sorted(mine, key=lambda h: -h['attribution'])[:len(sets[p])]
        fell[p] = [f'{h["layer"]}.{h["head"]}' for h in raw if not h['selected']]
    add(2, 'heads of the raw top that calibration removes', sum(map(len, fell.values())), any(fell.values()), 'heads.jsonl', used, heads=fell)

    t = tensor_file(run / 'ablation.safetensors')
    for p in PHASES:
        for key, a in (('effect', tensors['attribution'].numpy()), ('attribution_ig', t.get('attribution_ig'))):
            use = np.array([e['phase'] == p and e['id'] in test and e['margin'] > 0 for e in events], bool)
            if key in t:
                use &= ~np.isnan(t['effect'][:, 0, 0]) & ~np.isnan(a[:, 0, 0])
            if key not in t or not use.any():
                if key == 'effect':
                    add(3, f'Spearman, {p}', None, None, 'ablation.safetensors', reason='not computed: ablate.py has not run, or no such event')
                continue
            who = [e['id'] for e, u in zip(events, use) if u]
            a, x = (note_means(y[use].reshape(use.sum(), -1), who) for y in (a, t['effect']))
            rho = spearman(*(np.stack([y[pick].mean(0) for pick in (np.arange(len(a)), *resamples(len(a), seed, 500))]) for y in (a, x)))
            low, high = interval(rho[1:], len(a))
            add(3, f'Spearman, {p}' + ('' if key == 'effect' else ' (integrated gradients)'), (float(rho[0]), low, high), low > 0.5, 'ablation.safetensors', len(a))
    limit = 0.35 if L * H < 50 else 0.15
    for p in PHASES:
        if sets[p]:
            add(4, f'share of heads, {p}', len(sets[p]) / (L * H), len(sets[p]) / (L * H) <= limit, 'heads.jsonl', used, limit=limit, heads=[f'{l}.{h}' for l, h in sets[p]],
                layers=np.bincount([l for l, _ in sets[p]], minlength=L).tolist())
    for p, (v, low, high, chance, n) in split_half(run, sets, discovery, seed).items():
        add(5, f'split-half Jaccard, {p}', (v, low, high), low > chance, 'events.safetensors', n, chance_95=chance)

    tests = {(r['kind'], r['set'], r['phase']): r for r in jsonl(run / 'sets.jsonl')}
    for p in PHASES:
        own = tests.get(('necessity', p, p))
        others = [tests[k] for k in tests if k[0] == 'necessity' and k[2] == p and k[1] != p]
        if own and others:
            diffs = [mean_interval([own['notes'][i] - o['notes'][i] for i in own['notes']], seed) for o in others]
            worst = min(diffs, key=lambda d: d[1])
            add(6, f'own set minus another phase\'s, {p}', worst, worst[1] > 0, 'sets.jsonl', own['n'], unit='logits of margin')
    for claim, kind in ((7, 'necessity'), (8, 'keep-only')):
        for p in PHASES:
            r = tests.get((kind, p, p))
            if not r:
                continue
            if not r['measurable']:
                add(claim, f'{kind}, {p}: notes above their controls', None, None, 'sets.jsonl', reason=f'not measurable: the drop is below the drift of the null rows ({r["drift"]:.1e})')
                continue
            if r.get('pass') is None:
                add(claim, f'{kind}, {p}: notes above their controls', None, None, 'sets.jsonl', reason='no control: too few heads outside the set')
                continue
            add(claim, f'{kind}, {p}: notes above their controls', (r['pass'], r['pass_low'], r['pass_high']), r['pass_low'] >= 0.9, 'sets.jsonl', r['n'],
                ratio=[r['value'], r['low'], r['high']], layers_matched=r['layers_matched'])
    knock = jsonl(run / 'knockin.jsonl')
    for p in PHASES:
        donor, same = ([r for r in knock if r['phase'] == p and r['set'] == s] for s in ('selected', 'same-answer'))
        if donor:
            s = knockin_summary(donor, same, seed)
            quiet = s['same'][0] is not None and s['same'][0] <= 0.1
            add(8, f'knock-in, {p}: notes above their controls', s['pass'], s['pass'][1] is not None and s['pass'][1] >= 0.9 and quiet, 'knockin.jsonl', s['n'],
                ratio=s['recovery'], same_answer=s['same'], reason='no control: too few heads outside the set')
    # ---- 9, 10: families
    families, read, chosen = jsonl(run / 'families.jsonl'), tensor_file(run / 'reading.safetensors'), {}
    for kind, p in (('region reader', 'coarse'), ('look-back', 'contrast')):
        heads = chosen[kind] = [(r['layer'], r['head']) for r in families if r['family'] == kind]
        use = np.flatnonzero([e['phase'] == p and e['id'] in test and e['margin'] > 0 for e in events])
        if len(use) and p == 'contrast':
            use = use[read['count'][use, NEAR] > 0]
        if not heads or not len(use):
            add(9, f'{kind} heads', None, None, 'families.jsonl', reason='not computed: no such head' if not heads else 'not computed: no such event')
            continue
        m, count = sum(read['mass'][use, l, h] for l, h in heads).astype(float) / len(heads), read['count'][use]
        who = [events[i]['id'] for i in use]
        if kind == 'look-back':
            x = mean_interval(note_means(m[:, NEAR] - m[:, OTHERS], who), seed)
        else:
            x = ratio_interval(by_note(m[:, REGION], who)[1], by_note(m[:, LIST] * count[:, REGION] / np.maximum(count[:, LIST], 1), who)[1], seed)
        add(9, {'look-back': 'look-back: attention on the near-miss minus on others', 'region reader': 'region readers: lift of the own region'}[kind], x,
            x[0] is not None and x[1] > (0 if kind == 'look-back' else 1), 'reading.safetensors', len(set(who)), heads=[f'{l}.{h}' for l, h in heads])
    if all(chosen.values()):
        a, b = (set(x) for x in chosen.values())
        chance = float(hypergeom.sf(len(a & b) - 1, L * H, len(a), len(b)))
        add(9, 'heads in both families', len(a & b), chance > 0.05, 'families.jsonl', used, p_value=chance, sizes=[len(a), len(b)])
    for r in jsonl(run / 'sets.jsonl'):
        if r['kind'] in ('block', 'residual', 'random span'):
            add(10, f'{r["kind"]} / ablation, {r["set"]}', (r['value'], r['low'], r['high']), None if r['value'] is None else r['value'] >= 0.8 if r['kind'] == 'block' else r['value'] <= 0.2,
                'sets.jsonl', r['n'], mass=r['mass'], control_mass=r['control_mass'])

    # ---- 11, 12: early elicitation, at the cut chosen on discovery notes
    early = jsonl(run / 'early.jsonl')
    k = next((r['k'] for r in early if r['site'] is not None), None)
    at = [r for r in early if r['k'] == k and r['id'] in test]
    for base, name in (('note_margin', 'the note alone'), ('matched_margin', 'before any mention')):
        both = [r for r in at if r[base] is not None]
        if both:
            own, gain = note_means([[float(r['margin'] > 0), (r['margin'] > 0) - float(r[base] > 0)] for r in both], [r['id'] for r in both]).T
            x = mean_interval(gain, seed)
            add(11, f'region right {k} tokens early, minus {name}', x, x[1] > 0, 'early.jsonl', len(own), accuracy=float(own.mean()))
    early_heads = [(r['layer'], r['head']) for r in jsonl(run / 'early_heads.jsonl') if r['selected']]
    causal, coarse = tests.get(('necessity', 'early', 'early')), sets['coarse']
    if early_heads and coarse:
        x = len(set(early_heads) & set(coarse))
        chance = float(hypergeom.sf(x - 1, L * H, len(early_heads), len(coarse)))
        add(12, 'early heads that are coarse heads', x, chance > 0.05, 'early_heads.jsonl', used, p_value=chance, size=len(early_heads))
        x = float(np.median([l for l, _ in early_heads]) - np.median([l for l, _ in coarse]))
        add(12, 'median layer, early minus coarse', x, x < 0, 'early_heads.jsonl', used)
        asked, note = jsonl(run / 'early_sites.jsonl'), tensor_file(run / 'early.safetensors')['note']
        share = {}
        for part, rows_, get in ((0, asked, lambda i: np.mean([note[i, l, h] for l, h in early_heads])), (1, events, lambda i: np.mean([read['mass'][i, l, h, NOTE] for l, h in coarse]))):
            for i, e in enumerate(rows_):
                if e['id'] in test and e['phase'] in ('early', 'coarse'):
                    share.setdefault(e['id'], ([], []))[part].append(get(i))
        x = mean_interval([np.mean(a) - np.mean(b) for a, b in share.values() if a and b], seed)
        add(12, 'attention on the note, early minus coarse', x, x[0] is not None and x[1] > 0, 'early.safetensors', len(share))
    if causal:
        add(12, 'drop of the early margin when early heads are ablated', (causal['drop'], causal['drop_low'], causal['drop_high']), causal['drop_low'] > 0, 'sets.jsonl', causal['n'],
            share=causal['value'], control_95=float(np.percentile(causal['controls'], 95)) if causal['controls'] else None, unit='logits of margin')
    for c in (9, 10, 11, 12):
        if not any(r['claim'] == c for r in rows):
            add(c, CLAIMS[c], None, None, 'early.jsonl' if c > 10 else 'families.jsonl', reason='not computed: ' + ('no such head' if c in (9, 10, 12) else 'the region is nowhere elicited, or no codes'))
    for c in (6, 7, 8):
        if not any(r['claim'] == c for r in rows):
            add(c, CLAIMS[c], None, None, 'sets.jsonl', reason='not computed: no set test of that kind')
    return rows


def recurrence(rows, first, second):
    """Claim 13: of the claims 1-12 that the first reasoner shows (every row of it holds), how many the second shows too."""
    shown = lambda who: {c for c in range(1, 13) for x in [[r['holds'] for r in rows if r['claim'] == c and r['model'] == who and r['value'] is not None]] if x and all(x)}
    a, b = shown(first), shown(second)
    if not a:
        return []
    return [{'claim': 13, 'name': f'claims of {first} that {second} shows too', 'model': second, 'value': len(a & b) / len(a), 'low': None, 'high': None, 'n': len(a), 'holds': a <= b,
             'from': 'evaluation.jsonl', 'shown_first': sorted(a), 'shown_both': sorted(a & b)}]


ARMS = {'CoT': '#555555', 'MISTILL': '#009E73', 'random pool': '#CC79A7', 'band pool': '#E69F00'}


def student_table(task, runs, results):
    """One entry a trained student that was characterized: arm, seed, precision, F1, contrast recovery, its training log. Of
    one arm, seed and precision trained with several lambdas, `chosen` is the one of the lowest dev cross-entropy: one rule."""
    out = []
    def family(folder):                                           # model_type of a folder, named from here or from the work directory
        found = [x for x in (pathlib.Path(folder) / 'config.json', task.work / 'students' / pathlib.Path(folder).name / 'config.json') if x.exists()]
        return json.loads(found[0].read_text()).get('model_type') if found else None
    for run in runs:
        folder = task.work / 'students' / run.name
        s = json.loads((folder / 'manifest.json').read_text())['distill']['settings']
        log = jsonl(folder / 'log.jsonl')
        donor = [r for r in jsonl(run / 'knockin.jsonl') if r['phase'] == 'contrast' and r['set'] == 'selected']
        keep = [r for r in jsonl(run / 'sets.jsonl') if r['kind'] == 'keep-only' and r['set'] == r['phase'] == 'contrast']
        gain = {}
        for r in donor:
            n, d = gain.get(r['id'], (0, 0))
            gain[r['id']] = (n + r['d_patched'] - r['d_rec'], d + r['d_src'] - r['d_rec'])
        out.append({'name': run.name, 'arm': 'CoT' if not s['lam'] else 'MISTILL' if s['pool'] == 'top' else f'{s["pool"]} pool', 'seed': s['seed'], 'precision': s['precision'], 'lam': s['lam'],
                    'kind': 'same-family' if family(folder) == family(s['teacher']) else 'cross-family', 'size': donor[0]['size'] if donor else None, 'log': log,
                    'dev': min((x['dev'] for x in log if 'dev' in x), default=None), 'scores': results[run.name], 'gain': gain,
                    'recovery': knockin_summary(donor, [], 0)['recovery'] if donor else (None,) * 3, 'keep': (keep[0]['value'], keep[0]['low'], keep[0]['high']) if keep else (None,) * 3})
    for s in out:
        rivals = [x for x in out if all(x[k] == s[k] for k in ('arm', 'seed', 'precision', 'kind'))]
        s['chosen'] = s is min(rivals, key=lambda x: (x['dev'] is None, x['dev'] or 0, x['lam']))
    return sorted(out, key=lambda r: (r['kind'], r['precision'], r['seed'], list(ARMS).index(r['arm']), r['lam']))


def paired(a, b, stat, seed, draws=2000):
    """stat of arms a, b with a cluster bootstrap over notes, the same notes in both arms and all seeds.
    a, b: lists (one a seed) of {note: (num, den)}; stat(num_a, den_a, num_b, den_b) on sums."""
    notes = sorted(set().union(*a, *b))
    m = lambda xs: np.array([[sum(x.get(i, (0, 0))[k] for x in xs) for i in notes] for k in (0, 1)], float)
    A, B = m(a), m(b)
    f = lambda p: stat(*A[:, p].sum(1), *B[:, p].sum(1))
    value = f(np.arange(len(notes)))
    boot = [x for x in map(f, resamples(len(notes), seed, draws)) if x is not None]
    return (None,) * 3 if value is None or not boot else (float(value), *interval(boot, len(notes)))


def student_claims(students, seed):
    """Rows for claims 14-17, for every kind of student and precision that has both arms of a comparison; pairs share a seed."""
    rows = []
    share = lambda a, b: None if abs(b) < 1e-9 else a / b
    minus = lambda a, b, c, d: None if share(a, b) is None or share(c, d) is None else a / b - c / d
    over = lambda a, b, c, d: None if share(a, b) is None or not share(c, d) else (a / b) / (c / d)
    for kind, precision in dict.fromkeys((s['kind'], s['precision']) for s in students):
        by = lambda arm: {s['seed']: s for s in students if s['chosen'] and (s['arm'], s['kind'], s['precision']) == (arm, kind, precision)}

        def compare(claim, name, other, what, stat, rule):
            a, b = by('MISTILL'), by(other)
            both = sorted(a.keys() & b.keys())
            if not both:
                return
            get = (lambda s: s['gain']) if what == 'recovery' else (lambda s: s['scores'].get('counts', {}))
            x, y = [get(a[s]) for s in both], [get(b[s]) for s in both]
            if what == 'F1':                                      # a note counts where neither arm's trace was cut
                x, y = [[{i: c for i, c in u.items() if i in v} for u, v in zip(p, q)] for p, q in ((x, y), (y, x))]
            value = paired(x, y, stat, seed) if all(x) and all(y) else (None,) * 3
            if stat is over and value[0] is not None:             # a ratio needs a denominator whose own interval leaves zero out
                _, low, high = paired(y, y, lambda a, b, c, d: share(a, b), seed)
                value = value if low is not None and (low > 0 or high < 0) else (None,) * 3
            one = [paired([u], [v], stat, seed)[0] for u, v in zip(x, y) if u and v]
            few = what == 'recovery' and len(both) < 3
            rows.append({'claim': claim, 'name': f'{name}, {len(both)} seed{"s" * (len(both) > 1)}', 'model': f'{kind} students, {precision}', 'value': value[0], 'low': value[1], 'high': value[2],
                         'n': len(set().union(*x)), 'holds': None if value[0] is None or few else bool(rule(value, one)), 'from': 'runs/*/knockin.jsonl' if what == 'recovery' else 'runs/*/traces.jsonl',
                         'seeds': len(both), 'by_seed': one, **({'reason': 'not measurable: too few events, or a recovery near zero'} if value[0] is None else {'reason': 'no verdict from fewer than 3 seeds'} if few else {})})
        if kind == 'cross-family':
            compare(14, 'contrast knock-in recovery, MISTILL / CoT', 'CoT', 'recovery', over, lambda v, one: v[1] > 1)
        else:
            compare(15, 'contrast knock-in recovery, MISTILL minus CoT', 'CoT', 'recovery', minus, lambda v, one: v[1] > 0 and all(x is not None and x > 0 for x in one))
        compare(16, 'micro F1, MISTILL minus CoT', 'CoT', 'F1', minus, lambda v, one: v[1] > -0.03 and v[2] < 0.03)
        compare(17, 'contrast knock-in recovery, MISTILL minus random pool', 'random pool', 'recovery', minus, lambda v, one: v[1] > 0)
        compare(17, 'micro F1, MISTILL minus random pool', 'random pool', 'F1', minus, lambda v, one: v[1] > 0)
    return rows

# ------------------------------------------------------------------------------------------------ figures

def figures(task, runs, students, folder):
    """PNG and PDF figures; returns their captions {png: caption}. No note text is drawn."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from safetensors.numpy import load_file
    plt.rcParams.update({'font.size': 9, 'figure.dpi': 150, 'axes.spines.top': False, 'axes.spines.right': False, 'pdf.fonttype': 42})
    captions = {}

    def save(fig, name, caption):
        fig.draw_without_rendering()                              # the layout, once for both
        fig.set_layout_engine('none')
        box = fig.get_tightbbox().padded(0.1)
        for kind in ('png', 'pdf'):
            fig.savefig(folder / f'{name}.{kind}', bbox_inches=box, metadata={'CreationDate': None} if kind == 'pdf' else None)
        plt.close(fig)
        captions[f'{name}.png'] = caption

    for run in runs:
        events = jsonl(run / 'events.jsonl')
        if events and (run / 'ablation.safetensors').exists():
            effect, sets = load_file(run / 'ablation.safetensors')['effect'], load_heads(run)
            L, H = effect.shape[1:]
            fig, axes = plt.subplots(1, 3, figsize=(3 * max(2.8, 0.8 + H * 0.26), max(2.2, 0.9 + L * 0.17)), layout='constrained')
            maps, ns = {}, {}
            for p in PHASES:
                use = np.array([e['phase'] == p and e['margin'] > 0 for e in events], bool) & ~np.isnan(effect[:, 0, 0])
                if use.any():
                    x = note_means(effect[use], [e['id'] for e, u in zip(events, use) if u])
                    maps[p], ns[p] = x.mean(0), len(x)
            for ax, p in zip(axes, PHASES):
                ax.set_title(f'{p} (n = {ns.get(p, 0)} notes)', fontsize=9)
                ax.set_xlabel('query head')
                ax.set_ylabel('layer')
                if p in maps:
                    top = np.abs(maps[p]).max() or 1
                    im = ax.imshow(maps[p], cmap='RdBu_r', vmin=-top, vmax=top, aspect='auto', origin='lower')
                    fig.colorbar(im, ax=ax, shrink=0.9).set_label('drop in margin (logits)', fontsize=8)
                    ax.scatter([h for _, h in sets[p]], [l for l, _ in sets[p]], s=60, facecolors='none', edgecolors='black', linewidths=1.2)
                ax.set_xticks(range(0, H, 1 if H < 12 else 4))
                ax.set_yticks(range(0, L, 1 if L < 12 else 5))
            save(fig, f'heads-{run.name}', f'{run.name}: mean drop in margin when one head is mean-ablated at the event, all measured notes; rings: the selected set.')
        records = jsonl(run / 'sets.jsonl')
        curve = [r for r in records if r['kind'] == 'curve' and r['value'] is not None]
        if curve:
            shown = [p for p in PHASES if any(r['phase'] == p for r in curve)]
            fig, axes = plt.subplots(1, len(shown), figsize=(2.9 * len(shown), 2.7), layout='constrained', sharey=True, squeeze=False)
            for ax, p in zip(axes[0], shown):
                r = [r for r in curve if r['phase'] == p]
                k = [x['size'] for x in r]
                ax.plot(k, [x['value'] for x in r], color=COLOURS[p], marker='o', ms=3, label='top of the ranking')
                ax.fill_between(k, [x['low'] for x in r], [x['high'] for x in r], color=COLOURS[p], alpha=0.25, linewidth=0)
                band = [(x['size'], *np.percentile(x['controls'], [2.5, 50, 97.5])) for x in r if x['controls']]
                if band:
                    x, low, mid, high = zip(*band)
                    ax.plot(x, mid, color='grey', lw=1, label='random, same layers')
                    ax.fill_between(x, low, high, color='grey', alpha=0.2, linewidth=0)
                ax.axhline(0.8, color='black', lw=0.8, ls='--')
                if load_heads(run)[p]:
                    ax.axvline(len(load_heads(run)[p]), color='black', lw=0.8, ls=':')
                ax.set_xscale('log', base=2)
                ax.set_xticks(k, k, fontsize=7)
                ax.minorticks_off()
                ax.set_title(f'{p} (n = {r[0]["n"]} notes)', fontsize=9)
                ax.set_xlabel('heads kept')
            axes[0, 0].set_ylabel('keep-only recovery (share of margin)')
            axes[0, 0].legend(frameon=False, fontsize=7)
            save(fig, f'recovery-{run.name}', f'{run.name}: keep-only recovery against set size on held-out notes, 95 % interval over notes; grey: random sets of the same layers, median and 95 % of {len(curve[0]["controls"])}; dashed: the 80 % asked for on discovery notes; dotted: the selected size.')
        own = [r for r in records if r['kind'] in ('necessity', 'keep-only') and r['set'] == r['phase'] and 'edge' in r]
        if own:
            shown = [p for p in (*PHASES, 'early') if any(r['phase'] == p for r in own)]
            fig, axes = plt.subplots(2, len(shown), figsize=(2.5 * len(shown), 4.8), layout='constrained', squeeze=False)
            for r in own:
                ax = axes[int(r['kind'] == 'keep-only'), shown.index(r['phase'])]
                ids = sorted(r['notes'], key=r['notes'].get)
                ax.plot([r['edge'][i] for i in ids], range(len(ids)), '.', color='grey', ms=3, label='95 % of random sets')
                ax.plot([r['notes'][i] for i in ids], range(len(ids)), '.', color=COLOURS[r['phase']] if r['phase'] in COLOURS else '#CC79A7', ms=4, label='the set')
                ax.axvline(0, color='black', lw=0.6)
                ax.set_title(f'{r["kind"]}, {r["phase"]}\n{r["pass"]:.2f} of {r["n"]} notes above', fontsize=8)
                ax.set_xlabel('drop (logits)' if r['kind'] == 'necessity' else 'recovered (logits)', fontsize=8)
            for ax in axes[:, 0]:
                ax.set_ylabel('held-out note (sorted)')
            axes[0, 0].legend(frameon=False, fontsize=6)
            save(fig, f'notes-{run.name}', f'{run.name}: note by note, mean over a note\'s events: what ablating the set costs (necessity) and what the set alone recovers (keep-only), beside the 95th percentile of its random sets of the same size and layers.')
        early = jsonl(run / 'early.jsonl')
        if early:
            fig, ax = plt.subplots(figsize=(4.2, 2.9), layout='constrained')
            test, ks = set(task.ids('test')), sorted({r['k'] for r in early})
            for key, label, colour in (('margin', 'trace cut k tokens before the code', '#0072B2'), ('note_margin', 'note alone', '#E69F00'), ('matched_margin', 'cut before any mention', '#999999')):
                line = []
                for k in ks:
                    at = [r for r in early if r['k'] == k and r['id'] in test and r[key] is not None]
                    x = note_means([float(r[key] > 0) for r in at], [r['id'] for r in at])
                    line.append((k, *mean_interval(x), len(x)) if len(x) else (k, *[np.nan] * 3, 0))
                x, y, low, high, n = zip(*line)
                ax.plot(x, y, color=colour, marker='o', ms=3, label=f'{label} (n = {min(n)}' + (f'-{max(n)}' if max(n) > min(n) else '') + ' notes)')
                ax.fill_between(x, np.array(low, float), np.array(high, float), color=colour, alpha=0.2, linewidth=0)
            ax.set_xlabel('k, tokens before the code')
            ax.set_ylabel('region right (share of mentions)')
            ax.set_ylim(-0.02, 1.02)
            ax.legend(frameon=False, fontsize=7)
            save(fig, f'early-{run.name}', f'{run.name}: how often the right region wins when the trace is cut k tokens before a code and the probe is appended, held-out notes, 95 % interval over notes.')
        family = [r for r in jsonl(run / 'families.jsonl') if r['family']]
        if family:
            fig, axes = plt.subplots(1, 2, figsize=(6.4, 1.1 + 0.17 * max(sum(r['family'] == k for r in family) for k in ('region reader', 'look-back'))), layout='constrained')
            for ax, kind, key, label, zero in ((axes[0], 'region reader', 'lift', 'attention on the own region over chance (lift)', 1), (axes[1], 'look-back', 'look_back', 'attention on the near-miss minus on others', 0)):
                r = sorted((r for r in family if r['family'] == kind), key=lambda r: r[key])
                for y, x in enumerate(r):
                    ax.errorbar(x[key], y, xerr=[[max(0, x[key] - x[f'{key}_low'])], [max(0, x[f'{key}_high'] - x[key])]], fmt='o', ms=3, color=COLOURS[x['phase']], capsize=2)
                ax.axvline(zero, color='black', lw=0.8, ls='--')
                ax.set_yticks(range(len(r)), [f'{x["layer"]}.{x["head"]}' for x in r], fontsize=7)
                ax.set_xlabel(label, fontsize=8)
                ax.set_title(f'{kind} heads' + (f' (n = {r[0]["n"]} notes)' if r else ': none'), fontsize=9)
            save(fig, f'families-{run.name}', f'{run.name}: the causal heads that read the candidate region (coarse) and the earlier near-miss (contrast), layer.head, discovery notes, 95 % interval over notes; dashed: chance.')
        tests = {(r['set'], r['phase']): r for r in records if r['kind'] == 'necessity' and r['phase'] in PHASES and r['value'] is not None}
        if tests:
            grid = np.array([[tests[s, p]['value'] if (s, p) in tests else np.nan for p in PHASES] for s in PHASES])
            fig, ax = plt.subplots(figsize=(4.6, 3.4), layout='constrained')
            im = ax.imshow(grid, cmap='Blues', vmin=0, vmax=max(1.0, np.nanmax(grid)))
            for i in range(3):
                for j in range(3):
                    if not np.isnan(grid[i, j]):
                        r = tests[PHASES[i], PHASES[j]]
                        ax.text(j, i, f'{grid[i, j]:.2f}\n[{r["low"]:.2f}, {r["high"]:.2f}]', ha='center', va='center', fontsize=7, color='white' if grid[i, j] > 0.6 * max(1.0, np.nanmax(grid)) else 'black')
            ax.set_xticks(range(3), PHASES)
            ax.set_yticks(range(3), [f'{s} set' for s in PHASES])
            ax.set_xlabel('phase measured')
            fig.colorbar(im, ax=ax, label='necessity (share of full drop)')
            save(fig, f'phases-{run.name}', f'{run.name}: ablating the set of one phase (rows) and measuring each phase (columns), held-out notes, 95 % intervals over notes.')
    if students:
        fig, axes = plt.subplots(1, 2, figsize=(7.5, 0.8 + 0.3 * len(students)), layout='constrained', sharey=True)
        names = [f'{s["arm"]} ({s["lam"]:g}), seed {s["seed"]}, {s["precision"]}, {s["kind"]}' for s in students]
        for ax, key, label in ((axes[0], lambda s: s['recovery'], 'contrast knock-in recovery (share)'), (axes[1], lambda s: s['scores'].get('micro', (None,) * 3), 'micro F1 of own traces')):
            for y, s in enumerate(students):
                v = key(s)
                if v[0] is not None:
                    ax.errorbar(v[0], y, xerr=[[max(0, v[0] - v[1])], [max(0, v[2] - v[0])]], fmt='o', color=ARMS[s['arm']], capsize=3, mfc=ARMS[s['arm']] if s['chosen'] else 'white')
                else:
                    ax.text(0.5, y, 'not measurable', fontsize=7, ha='center', va='center', color=ARMS[s['arm']], transform=ax.get_yaxis_transform())
            ax.set_xlabel(label)
            ax.grid(axis='x', alpha=0.3)
        axes[0].set_yticks(range(len(names)), names, fontsize=7)
        axes[0].set_ylim(len(names) - 0.5, -0.5)
        n, size = [s['scores'].get('n', 0) for s in students], students[0]['size']
        save(fig, 'students', f'Students after training, heads rediscovered on their own traces, the same number of heads in every arm{f" ({size})" if size else ""}; 95 % intervals over notes; in brackets lambda, filled: chosen on dev; F1 on n = {min(n)} to {max(n)} held-out notes (truncated traces left out).')
    curves = [s for s in students if s['chosen'] and any('dev' in x for x in s['log'])]
    if curves:
        rows = list(dict.fromkeys((s['kind'], s['precision']) for s in curves))
        fig, axes = plt.subplots(len(rows), 4, figsize=(9.6, 0.4 + 2.1 * len(rows)), layout='constrained', sharex=True, squeeze=False)
        for (kind, precision), line in zip(rows, axes):
            for ax, key, label in zip(line, ('dev', *PHASES), ('dev cross-entropy (nats a token)', *(f'{p} decisions right (share)' for p in PHASES))):
                for arm in ARMS:
                    seeds = [{x['step'] + 1: x[key] for x in s['log'] if key in x} for s in curves if (s['arm'], s['kind'], s['precision']) == (arm, kind, precision)]
                    for x in seeds:
                        ax.plot(*zip(*x.items()), color=ARMS[arm], lw=0.6, alpha=0.45)
                    at = sorted(set.intersection(*map(set, seeds))) if seeds else []
                    ax.plot(at, [np.mean([x[t] for x in seeds]) for t in at], color=ARMS[arm], lw=2, label=f'{arm} ({len(seeds)})' if seeds else None)
                if ax in axes[0]:
                    ax.set_title(label, fontsize=8)
                if ax in axes[-1]:
                    ax.set_xlabel('optimiser steps')
                if key == 'dev':
                    ax.set_ylim(0)
                    ax.set_ylabel(f'{kind}, {precision}', fontsize=8)
                    ax.legend(frameon=False, fontsize=7)
                else:
                    ax.set_ylim(-0.02, 1.02)
        save(fig, 'training', f'Students against steps on the dev split, teacher-forced on the teacher\'s traces: cross-entropy and the share of decisions with a positive margin (n = {len(task.ids("dev"))} notes). Thick: mean over seeds (their number in brackets), thin: one seed; of several lambdas the one chosen on dev.')
    return captions


def main():
    p = common_args(__doc__)
    args = p.parse_args()
    task = load_task(args.work)
    name = args.name or pathlib.Path(args.model.rstrip('/')).name.removesuffix('.gguf')
    runs = sorted(r for r in (task.work / 'runs').glob('*') if (r / 'heads.jsonl').exists())
    if not any(r.name == name for r in runs):
        raise Fault(f'{task.work}/runs/{name} has no heads.jsonl; run characterize.py --model {args.model} first')
    command = f'python evaluate.py --work {args.work} --model {args.model}'
    trained = {r.name for r in runs if (task.work / 'students' / r.name / 'manifest.json').exists()
               and json.loads((task.work / 'students' / r.name / 'manifest.json').read_text()).get('distill', {}).get('settings', {}).get('teacher')}
    reasoners = [r for r in runs if r.name not in trained or r.name == name]
    rows = [row for r in sorted(reasoners, key=lambda r: r.name != name) for row in reasoner_claims(task, r, args.seed)]
    for r in reasoners:
        if r.name != name:
            rows += recurrence(rows, name, r.name)
    results = {r.name: scores(task, load_traces(r / 'traces.jsonl', task), 'test') for r in runs}
    students = student_table(task, [r for r in runs if r.name in trained], results)
    rows += student_claims(students, args.seed)
    for c in CLAIMS:
        if not any(r['claim'] == c for r in rows):
            rows.append({'claim': c, 'name': CLAIMS[c], 'model': name, 'value': None, 'low': None, 'high': None, 'n': 0, 'holds': None, 'from': None, 'reason': 'not computed'})
    rows = [{**r, 'command': command} for r in sorted(rows, key=lambda r: r['claim'])]
    write_jsonl(task.work / 'evaluation.jsonl', rows)
    captions = figures(task, [r for r in runs if r.name == name] + [r for r in runs if r.name != name and r.name not in trained], students, private_dir(task.work / 'figures'))

    # ---- report.md
    f = lambda x: '-' if x is None else f'{x:.3f}' if isinstance(x, float) else str(x)
    span = lambda x: '-' if x is None or x[0] is None else f'{x[0]:.3f} [{x[1]:.3f}, {x[2]:.3f}]'
    between = lambda r: '' if r['low'] is None else f'[{r["low"]:.3f}, {r["high"]:.3f}]'
    verdict = {True: 'holds', False: 'does not hold', None: '-'}

    def picture(r):                                               # the figure that shows a claim
        kind = {3: 'heads', 4: 'recovery', 6: 'phases', 7: 'notes', 8: 'notes', 9: 'families', 11: 'early'}.get(r['claim'])
        file = 'students.png' if r['claim'] in (14, 15, 16, 17) else f'{kind}-{r["model"]}.png'
        return f'[{file[:-4]}](figures/{file})' if file in captions and r['value'] is not None else ''
    text = [f'# {task.work.name}: what the runs say\n', f'{len(task.codes)} candidate codes, {len(task.notes)} notes. Intervals are 95 % over notes. Made by `{command}`.\n', '## Claims\n',
            '| # | claim | model | value | interval | n | verdict | figure |', '|---|---|---|---|---|---|---|---|']
    for r in rows:
        text.append(f'| {r["claim"]} | {r["name"]} | {r["model"]} | {f(r["value"]) if r["value"] is not None else r.get("reason", "not computed")} | '
                    f'{between(r) or "-"} | {r["n"]} | {verdict[r["holds"]]} | {picture(r)} |')
    robust = [(r.name, x) for r in reasoners for x in jsonl(r / 'sets.jsonl') if '(' in x['kind'] or x['kind'] == 'exhaustive']
    if robust:
        text += ['\n## Robustness\n', 'The set tests again with zeros, another event\'s values (resample) or the log-sum-exp margin (lse); and the smallest sufficient set by exhaustive search.\n',
                 '| model | test | phase | size | value | n |', '|---|---|---|---|---|---|']
        for n, x in robust:
            more = ''
            if x['kind'] == 'exhaustive':
                kept = '' if x['selected_recovery'] is None else f' and keeps {x["selected_recovery"]:.3f}'
                more = f' (the selected set has {x["selected_size"]}{kept}; {x["subsets"]} subsets, {x["events"]} events)'
            if x['value'] is None:
                value = x.get('reason') or 'denominator near zero'
            else:
                value = f(x['value']) if x['low'] is None else span((x['value'], x['low'], x['high']))
            text.append(f'| {n} | {x["kind"]} | {x["phase"]} | {f(x["size"])} | {value}{more} | {x["n"]} |')
    text += ['\n## Task scores of own traces, held-out notes\n', '| model | micro F1 | region F1 (micro) | macro F1 (labels seen) | macro F1 (all labels) | precision | recall | n | truncated |', '|---|---|---|---|---|---|---|---|---|']
    for r in runs:
        s = results[r.name]
        text.append(f'| {r.name} | {span(s.get("micro"))} | {span(s.get("region"))} | {span(s.get("macro"))} | {span(s.get("macro_all_labels"))} | {span(s.get("precision"))} | {span(s.get("recall"))} | {s["n"]} | {s["truncated"]} |')
    if students:
        text += ['\n## Students\n', '| student | kind | arm | seed | precision | dev ce | contrast knock-in recovery | contrast keep-only |', '|---|---|---|---|---|---|---|---|']
        text += [f'| {s["name"]}{"" if s["chosen"] else " (not chosen on dev)"} | {s["kind"]} | {s["arm"]} (lambda {s["lam"]:g}) | {s["seed"]} | {s["precision"]} | {f(s["dev"])} | {span(s["recovery"])} | {span(s["keep"])} |' for s in students]
    text += ['\n## Figures\n'] + [f'![{c}](figures/{n})\n\n*{c}*\n' for n, c in captions.items()]
    write_text(task.work / 'report.md', '\n'.join(text) + '\n')
    print(f'{"#":>2} {"claim":52} {"model":22} {"value":>8} {"interval":>18} {"n":>4}  verdict')
    for r in rows:
        if r['value'] is not None:
            print(f'{r["claim"]:2} {r["name"][:52]:52} {r["model"][:22]:22} {f(r["value"]):>8} {between(r):>18} {r["n"]:4}  {verdict[r["holds"]]}')
    print('not computed: claims ' + ', '.join(str(c) for c in CLAIMS if all(r['value'] is None for r in rows if r['claim'] == c)))
    print(f'{task.work}/report.md, {len(captions)} figures')


if __name__ == '__main__':
    main()
