"""characterize.py - traces -> events -> attribution -> null calibration -> the heads that decide.

    python characterize.py --work W --model M                     # the model's own greedy traces
    python characterize.py --work W --model M --traces T.jsonl    # traces made elsewhere, re-scored by this model

Writes into WORK/runs/NAME: traces.jsonl, events.jsonl, dropped.jsonl, events.safetensors, heads.jsonl, selection.jsonl,
families.jsonl, reading.safetensors, early.jsonl, early_heads.jsonl, early.safetensors.
Passes over the notes, each kept note by note: a clean one (z, logits, margins); one with gradient (attribution at events and at
matched null positions; what every head reads there); keep-only rows that find the smallest sufficient prefix of the ranking;
the trace cut 1 to K tokens before each code and probed for its region. Heads, families and the cut are chosen on discovery
notes alone; nothing here looks at a test note's ablations.
"""
import json

import numpy as np
import torch
from tqdm import tqdm

from common import (LIST, NEAR, NOTE, OTHERS, PHASES, REGION, EarlySites, Probe, EventFinder, at_least, answer_codes, attribution, barrier, begin, by_note, common_args, each_note, finish,
                    folder_hash, list_regions, load_model, load_task, load_encoder, load_traces, loo_means, margin, mean_interval, measure, mentions,
                    note_means, prefill, prefix_kv, rank, ratio_interval, reading_spans, run_dir, scored, silent, write_jsonl, write_tensors, world)

J = 4                    # null positions of an event [S]
PERMUTATIONS = 100       # of event/null labels within notes, for each head, at least 2,000 in all: Benjamini-Hochberg over X heads cannot pass a lone head on under 20 X [A]
FLOOR = 0.01             # effect floor: a head's calibrated score as a share of the phase's mean clean margin [A]
RECOVERY = 0.8           # keep-only recovery that the smallest set must reach [S]
LARGEST = 64             # longest prefix of the ranking that is tried; longer sets are not "small" [A]


@torch.no_grad()
def generate(model, enc, prefix, notes, max_new, batch=32):
    """Greedy completions of notes (list of records) behind the shared prefix: yields (ids, truncated) in order. A decode
    step is a forward of rows: each sees the shared prefix and its own memory, which is never expanded over the batch."""
    P, device = len(enc.prefix), model.device
    for at in tqdm(range(0, len(notes), batch), desc='traces', unit='batch', disable=None, leave=False):
        prompts = [enc.note(n) for n in notes[at:at + batch]]
        B, S = len(prompts), max(map(len, prompts)) + max_new
        own_pos = torch.full((B, S), -1, device=device)
        memory, token = {}, torch.zeros(B, dtype=torch.long)
        for b, p in enumerate(prompts):
            logits, probe = prefill(model, p, prefix, keep_kv=True, head=(torch.tensor([len(p) - 1]), None))
            token[b] = logits[0, 0].argmax()
            for l, (k, v) in probe.kv.items():
                if l not in memory:
                    memory[l] = [x.new_zeros(B, x.shape[1], S, x.shape[3]) for x in (k, v)]
                for buffer, x in zip(memory[l], (k, v)):
                    buffer[b, :, :len(p)] = x[0]
            own_pos[b, :len(p)] = P + torch.arange(len(p), device=device)
        out, live = [[] for _ in prompts], list(range(B))
        for step in range(max_new):
            for i, b in enumerate(live):
                out[b].append(int(token[i]))
            keep = [i for i, b in enumerate(live) if out[b][-1] not in enc.eos]
            if len(keep) < len(live):                             # finished sequences leave the batch
                live, token, own_pos = [live[i] for i in keep], token[keep], own_pos[keep]
                memory = {l: [x[keep] for x in kv] for l, kv in memory.items()}
            if not live or step + 1 == max_new:
                break
            slot = torch.tensor([len(prompts[b]) + step for b in live], device=device)
            own_pos[torch.arange(len(live)), slot] = P + slot
            with Probe(model, past=prefix, rows=P + slot, memory=(memory, own_pos)):
                token = model(input_ids=token[None].to(device), position_ids=(P + slot)[None], use_cache=False).logits[0].argmax(-1).cpu()
        for ids in out:
            done = bool(ids) and ids[-1] in enc.eos
            yield ids[:-1] if done else ids, not done


def make_traces(args, task, model, enc, run, ids):
    """traces.jsonl of the model's own greedy completions. Each batch is appended to a partial file: a killed run goes on."""
    partial = run / f'traces.{rank()}.partial.jsonl'
    done = {}
    if partial.exists():
        lines = partial.read_bytes().split(b'\n')[:-1]            # a line without its end was cut by the kill
        done = {r['id']: r for r in map(json.loads, lines)}
        partial.write_bytes(b''.join(x + b'\n' for x in lines))
    todo = [i for i in ids[rank()::world()] if i not in done]
    prefix = prefix_kv(model, enc)
    for i, (out, truncated) in zip(todo, generate(model, enc, prefix, [task.notes[i] for i in todo], args.max_new_tokens, args.batch)):
        text = enc.tok.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        record = {'id': i, 'completion': text, 'codes': answer_codes(text, task), 'truncated': truncated}
        with partial.open('a', encoding='utf-8') as f:
            f.write(json.dumps(record, ensure_ascii=False) + '\n')
    barrier()
    if rank() == 0:
        every = {}
        for f in sorted(run.glob('traces.*.partial.jsonl')):
            every |= {r['id']: r for r in map(json.loads, f.read_text(encoding='utf-8').splitlines())}
        write_jsonl(run / 'traces.jsonl', [every[i] for i in ids])
        for f in run.glob('traces.*.partial.jsonl'):
            f.unlink()
    barrier()


def null_positions(events, margins, top_margin, relative, allowed, edges):
    """(E,J) positions of the same trace for each event, not code tokens, nearest in margin decile, then in relative
    position; -1 where the trace has too few. margins (E,), relative (n,) in [0,1], allowed (n,) bool, edges: deciles."""
    decile = lambda x: np.searchsorted(edges, x)
    free = np.flatnonzero(allowed)
    out = np.full((len(events), J), -1)
    for i, e in enumerate(events):
        if len(free) < J:
            continue
        cost = np.abs(decile(top_margin[free]) - decile(margins[i])) + np.abs(relative[free] - relative[e['at']])
        out[i] = free[np.argsort(cost, kind='stable')[:J]]
    return out


def calibrate(a_event, a_null, event_note, null_note, seed):
    """Null calibration of METHOD.md. a_event (n,X), a_null (m,X) with their notes; returns raw (X,), null (X,), c (X,)
    and one-sided p (X,) from permuting event/null labels within notes. Every mean is a mean over notes of means."""
    from scipy.stats import false_discovery_control
    rng = np.random.default_rng(seed)
    notes = [n for n in dict.fromkeys(event_note) if (null_note == n).any()]
    pools, raw, null = [], 0, 0
    for n in notes:
        e, z = a_event[event_note == n], a_null[null_note == n]
        raw, null = raw + e.mean(0) / len(notes), null + z.mean(0) / len(notes)
        pools.append((np.concatenate([e, z]), len(e)))
    c, above, chunk = raw - null, 0, 2000
    rounds = -(-PERMUTATIONS * a_event.shape[1] // chunk)
    for _ in range(rounds):
        perm = 0
        for pool, k in pools:
            weight = np.full((chunk, len(pool)), -1 / (len(pool) - k))
            chosen = rng.permuted(np.tile(np.arange(len(pool)), (chunk, 1)), axis=1)[:, :k]
            np.put_along_axis(weight, chosen, 1 / k, 1)
            perm = perm + weight @ pool / len(notes)
        above = above + (perm >= c - 1e-12).sum(0)
    p = (1 + above) / (rounds * chunk + 1)
    return raw, null, c, false_discovery_control(p, method='bh')


def main():
    p = common_args(__doc__)
    p.add_argument('--traces', help='traces.jsonl made elsewhere, copied in and re-scored')
    p.add_argument('--splits', default='discovery,test', help='splits whose events are measured; NAME or NAME=N')
    p.add_argument('--also-trace', default='', help='further splits to generate traces for (train,dev for a teacher; train=200: the first 200 notes)')
    p.add_argument('--limit', type=at_least(0), default=0, help='at most this many notes a split; 0: all')
    p.add_argument('--max-new-tokens', type=at_least(1), default=512, help='longest completion in tokens; longer ones are marked truncated')
    p.add_argument('--batch', type=at_least(1), default=32, help='notes generated together')
    p.add_argument('--coarse', default='first', choices=('first', 'settling'), help='which token of a region is the coarse event')
    p.add_argument('--early', type=at_least(0), default=8, help='largest number of tokens before a code at which its region is asked for; 0: none')
    p.add_argument('--ig', type=at_least(0), default=0, help='interpolation points of the gradient; 0: the plain gradient')
    args = p.parse_args()

    task, run = load_task(args.work), run_dir(args)
    settings = {k: getattr(args, k) for k in ('model', 'dtype', 'chat', 'margin', 'seed', 'splits', 'also_trace', 'limit', 'max_new_tokens', 'coarse', 'ig', 'early')}
    settings |= {'task': task.hash, 'weights': folder_hash(args.model), 'traces': folder_hash(args.traces) if args.traces else None}
    if begin(run, 'characterize', settings):
        return print(f'{run} is characterized already')
    model = load_model(args.model, args.dtype, args.device, args.device_map)
    enc = load_encoder(args.model, model, task, args.chat)
    L, H, D = model.probe_shape
    pick = lambda splits: [i for s in splits.split(',') if s for name, _, n in [s.partition('=')] for i in task.ids(name)[:int(n or args.limit) or None]]

    # ---- traces
    if not (run / 'traces.jsonl').exists():
        if args.traces:
            write_jsonl(run / 'traces.jsonl', load_traces(args.traces, task).values())
        else:
            make_traces(args, task, model, enc, run, pick(args.splits) + pick(args.also_trace))
    traces = load_traces(run / 'traces.jsonl', task)

    # ---- events
    wanted, finder, events, dropped = set(pick(args.splits)), EventFinder(enc, args.coarse), [], []
    ids, first = {}, {}
    for i, t in traces.items():
        if i in wanted:
            note = enc.note(task.notes[i])
            ids[i], first[i] = enc.prefix + note + enc.completion(t['completion'])[0], len(enc.prefix) + len(note)
            e, d = finder(i, t, first[i])
            events += e
            dropped += d
    events = [{'event': n, **e} for n, e in enumerate(events)]
    mine = {}
    for e in events:
        mine.setdefault(e['id'], []).append(e)
    table = {t: n for n, t in enumerate(sorted({t for e in events for t in [e['target'], *e['foils']]}))}
    prefix, P = prefix_kv(model, enc), len(enc.prefix)

    # ---- pass 1: z, logits and margins at events; top-1 and runner-up at every position of the trace
    def clean(i):
        ev = mine[i]
        at = torch.arange(first[i] - 1, len(ids[i]) - 1) - P      # every position that scores a token of the completion
        with torch.no_grad():
            logits, probe = prefill(model, ids[i][P:], prefix, z_at=torch.tensor([e['query'] - P for e in ev]), head=(at, None))
        row = [e['query'] - first[i] + 1 for e in ev]
        top = logits[0].float().topk(2)
        width, target, foil = scored(ev)
        return {'z': torch.stack([probe.z[l].float().cpu() for l in range(L)], 1), 'logits': logits[0, row][:, list(table)].float(),
                'margin': margin(logits[0, row][:, width], target, foil, args.margin), 'top': top.indices, 'top_margin': top.values[:, 0] - top.values[:, 1]}
    one = each_note(run, 'clean', list(mine), clean)
    for i, ev in mine.items():
        for e, m in zip(ev, one[i]['margin'].tolist()):
            e['margin'] = m
    z = torch.cat([one[i]['z'] for i in mine]) if mine else torch.zeros(0, L, H, D)
    discovery = set(task.ids('discovery'))
    mean_of, phases = loo_means(z, events, discovery)
    left_out = [p for p in PHASES if p not in phases]

    # ---- null positions, matched within the trace
    m_all = np.array([e['margin'] for e in events])
    edges = np.quantile(m_all, np.linspace(0.1, 0.9, 9)) if len(m_all) else np.zeros(9)
    nulls = {}
    for i, ev in mine.items():
        n = len(one[i]['top_margin'])
        allowed = np.ones(n, bool)
        offs = enc.completion(traces[i]['completion'])[1]
        for a, b, _ in mentions(traces[i]['completion'], task.index):
            allowed[[t for t, (s, x) in enumerate(offs) if s < b and x > a]] = False
        at = null_positions([{'at': e['query'] - first[i] + 1} for e in ev], [e['margin'] for e in ev], one[i]['top_margin'].numpy(),
                            np.arange(n) / max(1, n - 1), allowed, edges)
        nulls[i] = [(j, int(t)) for j in range(len(ev)) for t in at[j] if t >= 0]

    # ---- pass 2: attribution at events and at null positions, one backward a note; attention of every head on its spans
    regions = list_regions(enc)

    def attribute(i):
        ev = [e for e in mine[i]]
        top = one[i]['top']
        fake = [{'query': int(t) + first[i] - 1, 'target': int(top[t, 0]), 'foils': [int(top[t, 1])], 'phase': ev[j]['phase']} for j, t in nulls[i]]
        at = torch.tensor([e['query'] - P for e in ev + fake])
        spot = reading_spans(enc, regions, task.notes[i], traces[i]['completion'], ev, len(ids[i]))
        share = lambda w: torch.einsum('nht,nst->nhs', w, spot.to(w))
        probe = silent(model, ids[i][P:], prefix, z_at=at, attn_at=(torch.zeros(len(ev), dtype=torch.long), at[:len(ev)]), attn_map=share)
        both, mu = ev + fake, {p: mean_of(i, p) for p in phases}
        zz = torch.stack([probe.z[l].float().cpu() for l in range(L)], 1)
        ref = torch.stack([mu.get(e['phase'], torch.full((L, H, D), torch.nan)) for e in both])
        a = torch.cat([attribution(model, [*prefix, probe.kv], ids[i], both[s:s + 256], zz[s:s + 256], ref[s:s + 256], args.ig, args.margin)
                       for s in range(0, len(both), 256)])
        return {'attribution': a[:len(ev)], 'null': a[len(ev):], 'mass': torch.stack([probe.attn[l].cpu() for l in range(L)], 1), 'count': spot.sum(-1)}
    two = each_note(run, 'attribution', list(mine), attribute)
    cat = lambda k: torch.cat([two[i][k] for i in mine]) if mine else torch.zeros(0, L, H)
    a_event, a_null = cat('attribution'), cat('null')
    null_event = np.array([mine[i][j]['event'] for i in mine for j, _ in nulls[i]], np.int64)

    # ---- calibrated ranking, on discovery notes with a positive clean margin
    note_of, phase_of = np.array([e['id'] for e in events]), np.array([e['phase'] for e in events])
    use = np.array([e['id'] in discovery and e['margin'] > 0 for e in events], bool)
    score, order = {}, {}
    for ph in phases:
        sel = use & (phase_of == ph)
        nsel = sel[null_event] if len(null_event) else np.zeros(0, bool)
        if not nsel.any():
            continue
        x = calibrate(a_event[sel].flatten(1).numpy(), a_null[nsel].flatten(1).numpy(), note_of[sel], note_of[null_event][nsel], args.seed)
        floor = FLOOR * note_means(m_all[sel], note_of[sel]).mean()
        score[ph] = x
        rank_order = np.argsort(-x[2], kind='stable')
        order[ph] = [h for h in rank_order if x[3][h] < 0.05 and x[2][h] > floor][:LARGEST]

    # ---- pass 3: keep-only of every prefix of the ranking; the smallest that recovers enough is the set
    def keep(i):
        ev = [e for e in mine[i] if e['phase'] in order]
        if not ev or i not in discovery:
            return {'margin': torch.zeros(0)}
        probe = silent(model, ids[i][P:], prefix)
        event, masks = [], []
        for j, e in enumerate(ev):
            mask = torch.ones(LARGEST + 1, L * H, dtype=torch.bool)
            for k, h in enumerate(order[e['phase']]):
                mask[k + 1:, h] = False
            masks.append(mask[:len(order[e['phase']]) + 1])
            event += [j] * len(masks[-1])
        bank = torch.stack([mean_of(i, e['phase']) for e in ev])
        value, null = measure(model, [*prefix, probe.kv], ids[i], ev, event, (torch.cat(masks).view(-1, L, H), bank, torch.tensor(event)), rows=args.rows, how=args.margin)
        return {'margin': value, 'null': null, 'event': torch.tensor([ev[j]['event'] for j in event])}
    three = each_note(run, 'keep', [i for i in mine if i in discovery], keep)
    chosen, selection = {}, []
    for ph in order:
        rows = [(i, three[i]['margin'][at].numpy(), float(three[i]['null'][at][0])) for i in three if len(three[i]['margin'])
                for e in mine[i] if e['phase'] == ph and e['margin'] > 0 for at in [three[i]['event'] == e['event']]]
        who = [r[0] for r in rows]
        kept, null = np.stack([r[1] for r in rows]), np.array([r[2] for r in rows])
        den = by_note(null - kept[:, 0], who)[1]
        size, known = 0, False
        for k in range(1, kept.shape[1]):
            value, low, high = ratio_interval(by_note(kept[:, k] - kept[:, 0], who)[1], den, args.seed)
            selection.append({'phase': ph, 'size': k, 'recovery': value, 'low': low, 'high': high, 'n': len(den)})
            known |= value is not None
            if value is not None and value >= RECOVERY and not size:
                size = k
        # not reached: every head that calibration leaves; all heads together without a measurable effect: none
        chosen[ph] = [int(h) for h in order[ph][:size or len(order[ph])]] if known else []
    # ---- families: what causal heads read, on discovery notes. Region readers: coarse, lift above 1; look-back: contrast, above 0
    mass = torch.cat([two[i]['mass'] for i in mine]).double().numpy() if mine else np.zeros((0, L, H, 5))
    count = torch.cat([two[i]['count'] for i in mine]).numpy() if mine else np.zeros((0, 5))
    families = []
    for ph in phases:
        sel = np.flatnonzero(use & (phase_of == ph))
        both = sel[count[sel, NEAR] > 0]
        for h in range(L * H):
            m = mass[:, h // H, h % H]
            expected = m[sel, LIST] * count[sel, REGION] / np.maximum(count[sel, LIST], 1)
            lift = ratio_interval(by_note(m[sel, REGION], note_of[sel])[1], by_note(expected, note_of[sel])[1], args.seed)
            back = mean_interval(note_means(m[both, NEAR] - m[both, OTHERS], note_of[both]), args.seed) if ph == 'contrast' else (None,) * 3
            causal = h in order.get(ph, [])
            kind = 'region reader' if ph == 'coarse' and causal and lift[0] is not None and lift[1] > 1 else 'look-back' if causal and back[0] is not None and back[1] > 0 else None
            families.append({'phase': ph, 'layer': h // H, 'head': h % H, 'lift': lift[0], 'lift_low': lift[1], 'lift_high': lift[2], 'look_back': back[0],
                             'look_back_low': back[1], 'look_back_high': back[2], 'note': float(m[sel, NOTE].mean()) if len(sel) else None, 'n': len(set(note_of[sel])), 'family': kind})

    # ---- early elicitation: the trace cut k tokens before a code, a probe, and the margin of the code's region
    sites, places = EarlySites(finder) if args.early else None, {}
    for i, ev in mine.items() if sites else ():
        text, offs = traces[i]['completion'], enc.completion(traces[i]['completion'])[1]
        named = mentions(text, task.index)
        token = lambda a: first[i] + next(t for t, (_, e) in enumerate(offs) if e > a)
        where = [(e['code'], token(next(a for a, _, c in named if c == e['code']))) for e in ev if e['phase'] == 'coarse' and sites.decision(e['code'])]
        if where:
            places[i] = (where, token(named[0][0]))

    def elicit(i):
        where, start = places[i]
        cuts = sorted({first[i], *(p - k for p in [start, *(p for _, p in where)] for k in range(1, args.early + 1) if p - k >= first[i])})
        probe = silent(model, ids[i][P:], prefix)
        logits, column = dict(zip(cuts, sites.logits(model, [*prefix, probe.kv], cuts))), {t: n for n, t in enumerate(sites.tokens)}
        out = torch.full((len(where), args.early, 3), torch.nan)                              # the cut, the note alone, the same cut before any mention
        for n, (code, p) in enumerate(where):
            _, own, foils = sites.decision(code)
            score = lambda cut: logits[cut][[column[t] for t in own]].max() - logits[cut][[column[t] for t in foils]].max() if cut in logits else torch.nan
            for k in range(1, args.early + 1):
                if p - k >= first[i]:
                    out[n, k - 1] = torch.tensor([score(p - k), score(first[i]), score(start - k) if p != start else torch.nan])
        return {'margin': out}
    four = each_note(run, 'elicit', list(places), elicit)

    early, gain = [], {}
    for k in range(1, args.early + 1):
        got = [(i, four[i]['margin'][n, k - 1]) for i in places for n in range(len(places[i][0])) if not four[i]['margin'][n, k - 1, 0].isnan()]
        found = [(i, x) for i, x in got if i in discovery and not x[2].isnan()]
        if k > 1 and len({i for i, _ in found}) > 2:
            accuracy = note_means([[float(m > 0) for m in x] for _, x in found], [i for i, _ in found]).mean(0)
            gain[k] = accuracy[0] - accuracy[1:].max()
    best = max(gain, key=gain.get) if gain else None              # the cut with the largest gain over both baselines, on discovery notes
    asked = []
    f = lambda x: None if x.isnan() else float(x)
    for i in places:
        for n, (code, p) in enumerate(places[i][0]):
            for k in range(1, args.early + 1):
                m = four[i]['margin'][n, k - 1]
                if not m[0].isnan():
                    early.append({'id': i, 'code': code, 'k': k, 'split': task.notes[i]['split'], 'margin': f(m[0]), 'note_margin': f(m[1]), 'matched_margin': f(m[2]), 'site': None})
                    if k == best:
                        target, _, foils = sites.decision(code)
                        early[-1]['site'] = len(asked)
                        asked.append({'id': i, 'code': code, 'phase': 'early', 'cut': p - k, 'query': p - k + len(sites.ids) - 1, 'target': target, 'foils': foils, 'margin': f(m[0])})
    at_note = {}
    for e in asked:
        at_note.setdefault(e['id'], []).append(e)
    last = torch.tensor([len(sites.ids) - 1]) if sites else None

    def visit(i, **probe):
        whole = silent(model, ids[i][P:], prefix)
        return [(e, *sites.site(model, prefix, whole.kv, ids[i], e['cut'], **probe)) for e in at_note[i]]

    def site(i):
        spot = torch.zeros(len(ids[i]) + len(sites.ids))
        spot[:len(ids[i])] = reading_spans(enc, regions, task.notes[i], '', mine[i][:1], len(ids[i]))[0, NOTE].float()
        out = [probe for *_, probe in visit(i, z_at=last, attn_at=(torch.zeros_like(last), last), attn_map=lambda w: w @ spot[:w.shape[-1]].to(w))]
        return {k: torch.stack([torch.cat([getattr(x, f)[l].float().cpu() for l in range(L)]) for x in out]) for k, f in (('z', 'z'), ('note', 'attn'))}
    five = each_note(run, 'sites', list(at_note), site)
    z_early = torch.cat([five[i]['z'] for i in at_note]) if at_note else torch.zeros(0, L, H, D)
    note_early = torch.cat([five[i]['note'] for i in at_note]) if at_note else torch.zeros(0, L, H)
    early_mean, early_phases = loo_means(z_early, asked, discovery, ('early',))

    def attribute_early(i):
        z_of = dict(zip([id(e) for e in at_note[i]], five[i]['z']))
        return {'attribution': torch.cat([attribution(model, past, seq, [e], z_of[id(e)][None], early_mean(i, 'early')[None], args.ig, args.margin)
                                          for e, seq, past, _ in visit(i)])}
    six = each_note(run, 'early', [i for i in at_note if i in discovery], attribute_early) if early_phases else {}
    early_heads = []
    if six:
        good = [(i, a) for i in six for e, a in zip(at_note[i], six[i]['attribution']) if e['margin'] > 0]
        a = note_means(torch.stack([a.flatten() for _, a in good]), [i for i, _ in good]).mean(0) if good else np.zeros(L * H)
        for n, h in enumerate(np.argsort(-a, kind='stable')):
            early_heads.append({'phase': 'early', 'layer': int(h) // H, 'head': int(h) % H, 'attribution': float(a[h]), 'rank': n + 1, 'k': best,
                                'selected': bool(n < len(chosen.get('coarse', [])) and a[h] > 0)})

    heads = []
    for ph in PHASES:
        raw, null, c, q = score.get(ph, (np.full(L * H, np.nan),) * 4)
        ranks = np.argsort(np.argsort(-np.nan_to_num(c, nan=-np.inf), kind='stable')) + 1
        f = lambda v: None if np.isnan(v) else float(v)
        heads += [{'phase': ph, 'layer': h // H, 'head': h % H, 'attribution': f(raw[h]), 'null': f(null[h]), 'calibrated': f(c[h]), 'q_value': f(q[h]),
                   'rank': int(ranks[h]), 'selected': h in chosen.get(ph, [])} for h in range(L * H)]
    if rank() == 0:
        mean = torch.stack([mean_of(None, p) if p in phases else torch.zeros(L, H, D) for p in PHASES])
        write_tensors(run / 'events.safetensors', {
            'z': z, 'mean': mean, 'attribution': a_event, 'null': a_null, 'null_event': torch.tensor(null_event),
            'logits': torch.cat([one[i]['logits'] for i in mine]) if mine else torch.zeros(0, 0), 'tokens': torch.tensor(list(table), dtype=torch.long)})
        write_jsonl(run / 'events.jsonl', events)
        write_jsonl(run / 'dropped.jsonl', dropped)
        write_jsonl(run / 'heads.jsonl', heads)
        write_jsonl(run / 'selection.jsonl', selection)
        write_jsonl(run / 'families.jsonl', families)
        write_tensors(run / 'reading.safetensors', {'mass': torch.from_numpy(mass).float(), 'count': torch.from_numpy(count).int()})
        write_jsonl(run / 'early.jsonl', early)
        write_jsonl(run / 'early_sites.jsonl', asked)
        write_jsonl(run / 'early_heads.jsonl', early_heads)
        write_tensors(run / 'early.safetensors', {'z': z_early, 'note': note_early})
        finish(run, 'characterize')

        # ---- what came out
        cut = sum(t['truncated'] for t in traces.values())
        print(f'{len(traces)} traces ({cut} truncated), {len(events)} events, {len(dropped)} codes dropped, {L} layers x {H} heads')
        print(f'{"phase":9} {"events":>6} {"notes":>5} {"margin":>7} {"m > 0":>6} {"set":>4} {"share":>6}  recovery (discovery)')
        for ph in PHASES:
            sel = phase_of == ph if len(events) else np.zeros(0, bool)
            rec = next((s for s in selection if s['phase'] == ph and s['size'] == len(chosen.get(ph, []))), None)
            tail = f'{rec["recovery"]:.2f} [{rec["low"]:.2f}, {rec["high"]:.2f}]' if rec and rec['recovery'] is not None else '-'
            if sel.any():
                print(f'{ph:9} {sel.sum():6} {len(set(note_of[sel])):5} {m_all[sel].mean():7.2f} {(m_all[sel] > 0).mean():6.3f} {len(chosen.get(ph, [])):4} {len(chosen.get(ph, [])) / L / H:6.3f}  {tail}')
        if left_out:
            print(f'left out (events in fewer than 3 discovery notes): {", ".join(left_out)}')
        print('selected: ' + ('; '.join(f'{ph} ' + ' '.join(f'{h // H}.{h % H}' for h in c) for ph, c in chosen.items() if c) or 'nothing was selected'))
        for kind in ('region reader', 'look-back'):
            print(f'{kind} heads: ' + (' '.join(f'{r["layer"]}.{r["head"]}' for r in families if r['family'] == kind) or 'none'))
        if best:
            at = [r for r in early if r['k'] == best and r['split'] == 'discovery']
            hit = lambda key: np.mean([r[key] > 0 for r in at if r[key] is not None])
            print(f'early: {best} tokens before a code its region is right {hit("margin"):.2f} (note alone {hit("note_margin"):.2f}, before any mention {hit("matched_margin"):.2f}); '
                  'heads ' + (' '.join(f'{r["layer"]}.{r["head"]}' for r in early_heads if r['selected']) or 'none'))
        print(f'next: python ablate.py --work {args.work} --model {args.model}')


if __name__ == '__main__':
    main()
