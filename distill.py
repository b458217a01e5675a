"""distill.py - trains a causal LM on traces: chain-of-thought loss, with or without MISTILL's pooled-attention supervision.

    python distill.py --work W --student S --scratch --data W/train/copy.jsonl --name base      # from random weights
    python distill.py --work W --teacher M --student S --lam 0   --name cot-s0     --seed 0     # CoT arm
    python distill.py --work W --teacher M --student S --lam 0.3 --name mistill-s0 --seed 0     # MISTILL arm

loss = CE(reasoning + answer) / supervised tokens  +  lam * mean_phases mean_events KL(P_teacher || P_student)
P is the attention of a pool of heads at a decision event, averaged over heads and summed over the whitespace words of the
text, so that teacher and student may tokenize differently (METHOD.md, MISTILL). Only event rows of attention exist: E x T.
The teacher is read once, its rows are kept in WORK/runs/TEACHER/rows/, and it is gone before the student trains.
"""
import json
import pathlib
import re
import shutil
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tqdm import tqdm

from common import (PHASES, Encoder, EventFinder, Fault, Probe, at_least, attribution, barrier, begin, common_args, finish, folder_hash, load_encoder, load_heads, load_model,
                    load_task, load_tokenizer, load_traces, prefill, prefix_kv, private_dir, rank, read_jsonl, sha, silent, spans, world, write_tensors)

# ------------------------------------------------------------------------------------------------ words

def words(text):
    """[(start, end)] of the whitespace words of text: the units that teacher and student share."""
    return [m.span() for m in re.finditer(r'\S+', text)]


def token_words(offsets, units):
    """Which share of each token lies in which word: (token, word, weight) arrays; a token without a word is left out.
    A token across a boundary is split by character overlap. offsets, units: sorted (start, end) lists."""
    tokens, where, weight = [], [], []
    starts = np.array([u[0] for u in units] or [0])
    for t, (s, e) in enumerate(offsets):
        u = max(0, int(np.searchsorted(starts, s, 'right')) - 1)
        hits = []
        while u < len(units) and units[u][0] < e:
            overlap = min(e, units[u][1]) - max(s, units[u][0])
            if overlap > 0:
                hits.append((u, overlap))
            u += 1
        total = sum(o for _, o in hits)
        for u, o in hits:
            tokens.append(t), where.append(u), weight.append(o / total)
    return np.array(tokens, np.int64), np.array(where, np.int64), np.array(weight, np.float32)


class Words:
    """Token-to-word maps of whole sequences: prefix, note and completion are mapped part by part, as they are tokenized.
    Bin 0 holds BOS, template and any token without a word."""

    def __init__(self, enc):
        self.enc, self.raw = enc, enc.task.prompt
        ids, offs = spans(enc.tok, [enc.prefix_text])[0]
        self.prefix = self.part(enc.prefix_text, self.raw['prefix'], offs, 1)
        self.shift = enc.front

    def part(self, text, raw, offs, first):
        at = text.find(raw) if raw else 0
        units = [(s + at, e + at) for s, e in words(raw)]
        return token_words(offs, units), len(offs), first, first + len(units)

    def __call__(self, note, completion):
        """(token, word, weight) tensors over the tokens of one sequence, and its number of words W (bin 0 included)."""
        raw = self.raw['before_note'] + note['text'] + self.raw['after_note']
        text = self.enc.prompt_text(note)
        middle = self.part(text, raw, spans(self.enc.tok, [text])[0][1], self.prefix[3])
        tail = self.part(completion, completion, self.enc.completion(completion)[1], middle[3])
        out, base = [[], [], []], self.shift
        for (t, w, x), n, first, _ in (self.prefix, middle, tail):
            for o, y in zip(out, (t + base, w + first, x)):
                o.append(y)
            base += n
        t, w, x = (np.concatenate(o) for o in out)
        bare = np.setdiff1d(np.arange(base), t)
        return [torch.tensor(np.concatenate(p)) for p in ((t, bare), (w, np.zeros_like(bare)), (x, np.ones(len(bare), np.float32)))], tail[3]


def pool_mean(weights, pools):
    """(n,T): attention rows weights {layer: (n,H,T)} averaged over heads; pools: each row's own heads [(l,h)] (n lists)."""
    total, one = 0, next(iter(weights.values()))
    for l, w in weights.items():
        share = one.new_zeros(len(pools), w.shape[1])
        for j, heads in enumerate(pools):
            for m, h in heads:
                if m == l:
                    share[j, h] = 1 / len(heads)
        total = total + torch.einsum('nht,nh->nt', w, share)
    return total


def word_mass(mean, maps, W):
    """P (n,W): attention (n,T) summed over words, normalised."""
    token, word, share = (m.to(mean.device) for m in maps)
    P = mean.new_zeros(len(mean), W).index_add(1, word, mean[:, token] * share)
    return P / P.sum(1, keepdim=True)


def attention_loss(P_teacher, P_student):
    """KL(P_teacher || P_student) per event (n,), fp32. Zero mass is clamped before the log, so gradients stay finite."""
    pt, ps = P_teacher.float(), P_student.float()
    return (pt * (pt.clamp_min(1e-8).log() - ps.clamp_min(1e-8).log())).sum(1)

# ------------------------------------------------------------------------------------------------ teacher and pools

def teacher_rows(args, task, traces, pools):
    """Pooled attention of the teacher at every event of `traces`, read once: a file of {i: (n,W_i)} rows and a list of
    its events. Kept in runs/TEACHER/rows/; the teacher is not in memory afterwards."""
    run = task.work / 'runs' / pathlib.Path(args.teacher.rstrip('/')).name
    tok = load_tokenizer(args.teacher)
    enc = Encoder(tok, task, args.chat)
    finder, kept = EventFinder(enc), []
    for t in traces.values():
        kept += finder(t['id'], t, len(enc.prefix) + len(enc.note(task.notes[t['id']])))[0]
    kept = [e for e in kept if pools[e['phase']]]
    key = sha(sorted(pools.items()), enc.hash(), folder_hash(args.teacher), task.hash, [(t['id'], t['completion']) for t in traces.values()])
    path = private_dir(run / 'rows') / f'{key}.safetensors'
    if not path.exists() and rank() == 0:
        model = load_model(args.teacher, args.dtype, args.device, args.device_map)
        prefix, mapper, out = prefix_kv(model, enc), Words(enc), {}
        layers = {l for p in pools.values() for l, _ in p}
        for i, t in tqdm(traces.items(), desc='teacher rows', unit='note', disable=None, leave=False):
            mine = [e for e in kept if e['id'] == i]
            if not mine:
                continue
            ids = enc.note(task.notes[i]) + enc.completion(t['completion'])[0]
            q = torch.tensor([e['query'] - len(enc.prefix) for e in mine])
            probe = silent(model, ids, prefix, keep_kv=False, attn_at=(torch.zeros_like(q), q), attn_layers=layers)
            maps, W = mapper(task.notes[i], t['completion'])
            out[i] = word_mass(pool_mean(probe.attn, [pools[e['phase']] for e in mine]), maps, W)
        write_tensors(path, out)
        del model, prefix
    barrier()
    return path, kept


def student_pool(args, model, enc, task, traces, pools):
    """{phase: [(l,h)]}: as many heads as the teacher's pool has (at most half of the student's), chosen on the untrained
    student and then frozen. top: by attribution at the mapped events; random: any; band: all heads of the middle third of
    the layers. [A]"""
    L, H, D = model.probe_shape
    size = {p: min(len(pools[p]), max(1, L * H // 2)) for p in PHASES}
    if args.pool == 'band':
        return {p: [(l, h) for l in range(L // 3, max(L // 3 + 1, 2 * L // 3)) for h in range(H)] if size[p] else [] for p in PHASES}
    if args.pool == 'random':
        rng = np.random.default_rng(args.seed)
        return {p: [divmod(int(i), H) for i in rng.choice(L * H, size[p], replace=False)] for p in PHASES}
    finder, prefix, zs, events, state = EventFinder(enc), prefix_kv(model, enc), [], [], []
    for t in list(traces.values())[:args.pool_notes]:
        ids = enc.note(task.notes[t['id']]) + enc.completion(t['completion'])[0]
        mine, _ = finder(t['id'], t, len(enc.prefix) + len(enc.note(task.notes[t['id']])))
        if mine:
            at = torch.tensor([e['query'] - len(enc.prefix) for e in mine])
            probe = silent(model, ids, prefix, z_at=at)
            zs.append(torch.stack([probe.z[l] for l in range(L)], 1))
            events.append(mine)
            state.append((enc.prefix + ids, [*prefix, probe.kv]))
    flat = [e for mine in events for e in mine]
    mean = {p: torch.cat(zs)[[e['phase'] == p for e in flat]].mean(0) for p in PHASES if any(e['phase'] == p for e in flat)}
    total = {p: torch.zeros(L, H) for p in PHASES}
    for mine, z, (ids, past) in zip(events, zs, state):
        a = attribution(model, past, ids, mine, z.cpu(), torch.stack([mean[e['phase']] for e in mine]).cpu())
        for e, x in zip(mine, a):
            total[e['phase']] += x
    return {p: [divmod(int(i), H) for i in total[p].flatten().argsort(descending=True)[:size[p]]] for p in PHASES}

# ------------------------------------------------------------------------------------------------ examples

NONE = []                # the prefix of a sequence that holds it all: one object, so one group a step


def load_examples(args, task, enc, split=None):
    """(examples, traces). An example: ids (behind the prefix), n = first supervised token, prefix = what stands before
    and is run once a step with --prefix shared: the task's candidates, or a --data record's own (one object each)."""
    examples, traces, end, split = [], {}, list(enc.eos[:1]), split or args.split
    if args.data and split == args.split:
        rows = [(i, {'prefix': '', **r}) for i, r in read_jsonl(args.data, {'prompt': str, 'completion': str})]
        for i, r in rows:
            if not isinstance(r['prefix'], str):
                raise Fault(f'{args.data}:{i}: "prefix" should be str, found {type(r["prefix"]).__name__}')
        out = enc.tok([r[k] for _, r in rows for k in ('prompt', 'completion')], add_special_tokens=False)['input_ids']
        texts = list(dict.fromkeys(r['prefix'] for _, r in rows))
        before = {t: enc.prefix[:enc.front] + x for t, x in zip(texts, enc.tok(texts, add_special_tokens=False)['input_ids'] if texts else ())}
        examples = [{'id': f'{args.data}:{i}', 'prefix': before[r['prefix']], 'ids': a + b + end, 'n': len(a)} for (i, r), a, b in zip(rows, out[::2], out[1::2])]
    else:
        path = pathlib.Path(args.traces) if args.traces else task.work / 'runs' / pathlib.Path(args.teacher.rstrip('/')).name / 'traces.jsonl'
        traces = {i: t for i, t in load_traces(path, task).items() if task.notes[i]['split'] == split and not t['truncated']}
        for i, t in list(traces.items())[:args.limit or None]:
            note = enc.note(task.notes[i])
            examples.append({'id': i, 'prefix': enc.prefix, 'ids': note + enc.completion(t['completion'])[0] + end, 'n': len(note)})
        traces = {e['id']: traces[e['id']] for e in examples}
    if args.prefix == 'full':
        examples = [{**e, 'prefix': NONE, 'ids': e['prefix'] + e['ids'], 'n': len(e['prefix']) + e['n']} for e in examples]
    if not examples:
        raise Fault(f'nothing to train on: no whole trace of split {split} (or an empty {args.data})')
    for e in examples:
        T = len(e['prefix']) + len(e['ids'])
        if args.max_len and T > args.max_len:
            raise Fault(f'{e["id"]}: {T} tokens, --max-len is {args.max_len}; supervised tokens would be cut')
        if e['n'] >= len(e['ids']):
            raise Fault(f'{e["id"]}: no token to supervise')
    return examples, traces


def map_events(teacher_events, enc, task, traces, start):
    """The student's decision for each of the teacher's, by the character at which the code diverges: sets q (position in
    the student's own sequence) or counts the event as not mapped. Two events of a phase in one student token count once."""
    found, lost, seen = {}, 0, set()
    place, of = {}, {}
    for e in teacher_events:
        row = of[e['id']] = of.get(e['id'], -1) + 1               # its row in the note's tensor of teacher_rows
        if e['id'] not in place:
            ids, offs = enc.completion(traces[e['id']]['completion'])
            place[e['id']] = (offs, len(enc.note(task.notes[e['id']])) + (len(enc.prefix) if start == 0 else 0))
        offs, base = place[e['id']]
        t = next((i for i, (s, x) in enumerate(offs) if s <= e['start'] < x), None)
        key = (e['id'], e['phase'], t)
        if t is None or key in seen or base + t - 1 < 0:
            lost += 1
            continue
        seen.add(key)
        found.setdefault(e['id'], []).append((e['phase'], base + t - 1, row))
    return found, lost


def batches(n, size, steps, seed, ordered):
    """Indices of each step: file order, or a fresh permutation an epoch; a function of the seed and the step alone."""
    if ordered:
        return [[(s * size + j) % n for j in range(size)] for s in range(steps)]
    order = np.concatenate([np.random.default_rng((seed, epoch)).permutation(n) for epoch in range(steps * size // n + 1)])
    return order[:steps * size].reshape(steps, size).tolist()

# ------------------------------------------------------------------------------------------------ one step

CHUNK = 2 ** 26          # logits (positions x vocabulary) held at once; more are scored in chunks that backward recomputes


@dataclass
class Supervision:
    """What MISTILL adds to a step: events {note: [(phase, query, row)]}, the student's pool {phase: heads}, the teacher's
    pooled rows, and each note's token-to-word map (made when it is first seen)."""
    lam: float = 0.0
    events: dict = field(default_factory=dict)
    pool: dict = field(default_factory=dict)
    rows: object = None
    mapper: object = None
    task: object = None
    traces: dict = field(default_factory=dict)
    kd: float = 0.0                                               # weight of logit distillation, and its teacher and that one's prefix
    teacher: object = None
    teacher_past: list = ()

    def count(self, batch):
        return {p: sum(1 for e in batch for x in self.events.get(e['id'], ()) if x[0] == p) for p in PHASES}


def head_post(model):
    """What the model does to its head's output: x -> logits (soft cap or a scale), from its config."""
    c = model.config.get_text_config()
    cap, scale = getattr(c, 'final_logit_softcapping', None), getattr(c, 'logit_scale', None) or 1 / (getattr(c, 'logits_scaling', None) or 1)
    return lambda x: cap * torch.tanh(x / cap) if cap else x * scale if scale != 1 else x


def cross_entropy(model, hidden, target, soft=None, kd=0.0):
    """Summed cross-entropy of hidden states (n,C) against token ids (n,), fp32, never holding n x V logits: chunks are
    scored one after another and scored again in backward. soft: (teacher, its hidden states (n,C')): adds kd * KL(teacher ||
    student) over the tokens that both vocabularies have (either may be padded)."""
    out, post = model.get_output_embeddings(), head_post(model)

    def one(h, t, g=None):
        logits = post(out(h)).float()
        loss = F.cross_entropy(logits, t, reduction='sum')
        if g is not None:
            with torch.no_grad():
                wanted = head_post(soft[0])(soft[0].get_output_embeddings()(g)).float()
            both = min(logits.shape[1], wanted.shape[1])
            loss = loss + kd * F.kl_div(logits[:, :both].log_softmax(-1), wanted[:, :both].log_softmax(-1), reduction='sum', log_target=True)
        return loss
    step = max(1, CHUNK // out.weight.shape[0])
    parts = [x.split(step) for x in (hidden, target, *([soft[1]] if soft else []))]
    if len(hidden) <= step:
        return one(*(x[0] for x in parts))
    return sum(torch.utils.checkpoint.checkpoint(one, *x, use_reentrant=False) for x in zip(*parts))


def backward(model, part, past, labels, sup, count, pad, start=0, scale=1):
    """Adds to the gradients of one micro-batch: part, a list of examples; labels, count: supervised tokens and events by
    phase of the WHOLE batch, so that micro-batches and ranks add up to one mean. The Probe stays open through backward, where
    gradient checkpointing runs the layers again. scale: what an average over ranks will divide by. Returns (ce, kl)."""
    T = max(len(e['ids']) for e in part)
    ids = torch.tensor([e['ids'] + [pad] * (T - len(e['ids'])) for e in part], device=model.device)
    at = torch.tensor([b * T + t for b, e in enumerate(part) for t in range(e['n'] - 1, len(e['ids']) - 1)], device=model.device)
    target = ids.view(-1)[at + 1]
    where = [(b, q, phase, row) for b, e in enumerate(part) for phase, q, row in sup.events.get(e['id'], ())] if sup.lam else []
    attn_at = (torch.tensor([w[0] for w in where]), torch.tensor([w[1] for w in where])) if where else None
    pos = torch.arange(start, start + T, device=model.device).expand(len(part), -1)
    soft = None
    if sup.kd:
        with torch.no_grad():
            soft = sup.teacher, prefill(sup.teacher, ids, sup.teacher_past, head=(at, 'hidden'))[1].hidden
    with Probe(model, past=past, head=(at, 'hidden'), attn_at=attn_at, attn_layers={l for h in sup.pool.values() for l, _ in h}) as probe:
        model(input_ids=ids, position_ids=pos, use_cache=False)
        ce, kl = cross_entropy(model, probe.hidden, target, soft, sup.kd) / labels, torch.zeros((), device=model.device)
        own = [[j for j, w in enumerate(where) if w[0] == b] for b in range(len(part))]
        mean = pool_mean(dict(probe.attn), [sup.pool[w[2]] for w in where]).split([len(m) for m in own]) if where else ()
        each = torch.tensor([1 / (count[w[2]] * sum(c > 0 for c in count.values())) for w in where], device=model.device)
        for e, mine, rows in zip(part, own, mean):                # one token-to-word map a note
            if not mine:
                continue
            if 'maps' not in e:
                e['maps'] = sup.mapper(sup.task.notes[e['id']], sup.traces[e['id']]['completion'])
            wanted = sup.rows.get_tensor(e['id']).to(model.device)[[where[j][3] for j in mine]]
            kl = kl + (each[mine] * attention_loss(wanted, word_mass(rows, *e['maps']))).sum()
        (scale * (ce + sup.lam * kl)).backward()
    return float(ce.detach()), float(kl.detach())


class SharedPrefix:
    """The candidate list, which every sequence of a step shares, run once (exact): its keys and values are leaves of the
    sequences' graphs, their gradients add up in fp32, and one backward takes them through the prefix."""

    def __init__(self, model, ids):
        self.probe = Probe(model, keep_kv=True, head=(torch.tensor([0], device=model.device), 'hidden'))
        with self.probe:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        self.out = [x for l in self.probe.kv for x in self.probe.kv[l]]
        self.leaves = [x.detach().requires_grad_() for x in self.out]
        self.total = [torch.zeros_like(x, dtype=torch.float32) for x in self.leaves]
        self.past = [{l: tuple(self.leaves[2 * n:2 * n + 2]) for n, l in enumerate(self.probe.kv)}]

    def add(self):
        for x, t in zip(self.leaves, self.total):
            if x.grad is not None:
                t.add_(x.grad)
                x.grad = None

    def backward(self):
        with self.probe:                                          # open again: checkpointing runs the layers once more
            torch.autograd.backward(self.out, [t.to(x.dtype) for t, x in zip(self.total, self.out)])


def stochastic_round(x, generator):
    """fp32 -> bf16, up or down with probability by distance, so that small updates survive in the mean."""
    noise = torch.randint(0, 2 ** 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    return ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class Muon(torch.optim.AdamW):
    """AdamW, except for `hidden` matrices: they move along their momentum made orthogonal (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon), each group at its own rate. torch.optim.Muon orthogonalises in bf16, which
    on a CPU takes longer than the whole step; this one stays in the gradient's dtype and does equal shapes together."""

    def __init__(self, params, hidden, **kw):
        inner = {id(w) for w in hidden}
        super().__init__([{'params': [w for w in params if id(w) not in inner], 'hidden': False}, *([{'params': hidden, 'hidden': True}] if hidden else [])], **kw)

    @torch.no_grad()
    def step(self):
        shapes = {}
        for group in self.param_groups:
            for w in group['params'] if group['hidden'] else ():
                if w.grad is not None:
                    if 'momentum' not in self.state[w]:
                        self.state[w]['momentum'] = torch.zeros_like(w)
                    m = self.state[w]['momentum'].lerp_(w.grad, 0.05)
                    shapes.setdefault(tuple(w.shape), []).append((w, w.grad.lerp(m, 0.95), group))
                    w.grad = None                                 # AdamW passes over it
        super().step()
        for (rows, cols), alike in shapes.items():
            for (w, _, group), x in zip(alike, orthogonal(torch.stack([u for _, u, _ in alike]))):
                w.mul_(1 - group['lr'] * group['weight_decay']).add_(x, alpha=-group['lr'] * max(1, rows / cols) ** 0.5)


def orthogonal(G, steps=5):
    """(n,rows,cols) -> the same singular vectors, singular values near 1 (0.7 to 1.2): Newton-Schulz with Jordan's constants."""
    X = G.mT if G.shape[1] > G.shape[2] else G
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    return X.mT if G.shape[1] > G.shape[2] else X


@torch.no_grad()
def evaluate_dev(model, dev, events, past):
    """Teacher-forced on the dev split: cross-entropy a token, and the share of decisions with a positive margin by phase."""
    ce, tokens, right = 0.0, 0, {p: [] for p in PHASES}
    for e in dev:
        mine = events.get(e['id'], [])
        at = torch.tensor([*range(e['n'] - 1, len(e['ids']) - 1)])
        logits = prefill(model, e['ids'], past, head=(at, None))[0][0].float()
        ce += float(F.cross_entropy(logits, torch.tensor(e['ids'][e['n']:], device=logits.device), reduction='sum'))
        tokens += len(at)
        for x in mine:
            row = logits[x['query'] - len(e['prefix']) - e['n'] + 1]        # queries count the whole sequence
            right[x['phase']].append(float(row[x['target']] > row[x['foils']].max()))
    return {'dev': ce / tokens, **{p: float(np.mean(r)) for p, r in right.items() if r}}

# ------------------------------------------------------------------------------------------------ the loop

def main():
    p = common_args(__doc__, model=False)
    p.add_argument('--teacher', help='teacher model; its traces and heads are read from WORK/runs/TEACHER')
    p.add_argument('--student', required=True, help='model to train: folder, hub id or .gguf')
    p.add_argument('--name', required=True, help='folder under WORK/students')
    p.add_argument('--scratch', action='store_true', help="random weights from the student folder's config.json")
    p.add_argument('--embedding-std', type=float, default=0.1, help="of the token embeddings with --scratch (0: the config's own); at 0.02 the first layer drowns the token, and copying comes late")
    p.add_argument('--data', help='JSONL of {"prompt", "completion"}, in file order, in place of traces; "prefix", if there, stands before, and records that share it are a group for --prefix shared')
    p.add_argument('--traces', help='traces.jsonl to train on; default: the teacher\'s')
    p.add_argument('--split', default='train', help='notes whose traces are trained on')
    p.add_argument('--limit', type=at_least(0), default=0, help='at most this many traces; 0: all')
    p.add_argument('--lam', type=float, default=0.0, help='weight of the attention loss; 0 is the CoT arm')
    p.add_argument('--kd', type=float, default=0.0, help='weight of logit distillation, a baseline: the teacher stays in memory and must have the student\'s tokenizer')
    p.add_argument('--pool', default='top', choices=('top', 'random', 'band'), help="student's supervised heads")
    p.add_argument('--pool-notes', type=at_least(1), default=64, help='notes that rank the untrained student\'s heads')
    p.add_argument('--precision', default='fp32-master', choices=('fp32', 'fp32-master', 'bf16', 'bf16-sr'), help='fp32-master: bf16 forward, fp32 weights and state; bf16-sr: bf16 weights, rounded stochastically')
    p.add_argument('--prefix', default='full', choices=('full', 'shared', 'frozen'), help='the candidate list: in every sequence; once a step, exact; or keys and values without '
                   'gradient (an approximation: on a toy the gradient had a cosine of 0.95 with the exact one)')
    p.add_argument('--refresh', type=at_least(1), default=20, help='steps between recomputations of a frozen prefix')
    p.add_argument('--checkpoint', action='store_true', help='gradient checkpointing: less memory, one more forward')
    p.add_argument('--fsdp', action='store_true', help='with torchrun: weights, gradients and state split over the ranks (FSDP2); otherwise each rank holds them whole')
    p.add_argument('--steps', type=at_least(1), default=200)
    p.add_argument('--batch', type=at_least(1), default=16, help='sequences of one optimiser step')
    p.add_argument('--micro', type=at_least(0), default=0, help='sequences of one forward; 0: the whole batch')
    p.add_argument('--lr', type=float, default=2e-3)
    p.add_argument('--warmup', type=at_least(0), default=20, help='steps of linear warm-up; then constant')
    p.add_argument('--decay', type=float, default=0.2, help='share of the steps, at the end, over which the rate falls linearly to 0')
    p.add_argument('--muon', type=float, default=0.0, help='rate of the hidden matrices under Muon (0.02 with --lr 2e-3); 0: AdamW for all')
    p.add_argument('--weight-decay', type=float, default=0.0)
    p.add_argument('--clip', type=float, default=1.0, help='largest gradient norm')
    p.add_argument('--max-len', type=at_least(0), default=0, help='longest sequence in tokens; a longer one is an error')
    p.add_argument('--eval-every', type=at_least(0), default=0, help='steps between evaluations on the dev split\'s traces; the weights of the lowest dev cross-entropy are exported; 0: the last')
    p.add_argument('--save-every', type=at_least(1), default=100, help='steps between resume points')
    p.add_argument('--print-every', type=at_least(1), default=1, help='steps between lines on the screen; log.jsonl has every step')
    args = p.parse_args()

    task = load_task(args.work)
    out = private_dir(private_dir(task.work / 'students') / args.name)
    settings = {k: v for k, v in vars(args).items() if k not in ('rows', 'device', 'device_map', 'show_text', 'work', 'save_every', 'print_every', 'micro', 'checkpoint', 'fsdp')}
    settings |= {'task': task.hash, 'init': folder_hash(args.student), 'source': folder_hash(args.data or args.traces) if args.data or args.traces else None}
    if args.teacher:
        run = task.work / 'runs' / pathlib.Path(args.teacher.rstrip('/')).name
        settings['source'] = settings['source'] or folder_hash(run / 'traces.jsonl')
        settings['heads'] = folder_hash(run / 'heads.jsonl') if args.lam else None
    elif args.lam or args.kd or not (args.data or args.traces):
        p.error('--teacher is needed for traces, for lam > 0 and for kd > 0')
    if args.data and args.prefix == 'frozen':
        p.error('--prefix frozen keeps the task\'s candidates; --data has its own: full or shared')
    if args.data and args.kd and args.prefix != 'full':
        p.error('--kd reads the whole sequence of a --data record: --prefix full')
    if begin(out, 'distill', settings):
        return print(f'{out} is trained already')

    # ---- student, examples, teacher rows
    model = load_model(args.student, 'float32', args.device, args.device_map, args.seed if args.scratch else None)
    if args.scratch and args.embedding_std:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=args.embedding_std, generator=torch.Generator(model.device).manual_seed(args.seed))
    enc = load_encoder(args.student, model, task, args.chat)
    examples, traces = load_examples(args, task, enc)
    start = len(examples[0]['prefix'])
    sup = Supervision(args.lam, task=task, traces=traces)
    if args.lam:
        pools = load_heads(run)
        if not any(pools.values()):
            raise Fault(f'{run}/heads.jsonl selects no head: there is nothing to supervise (lam must be 0)')
        path, kept = teacher_rows(args, task, traces, pools)
        sup.pool = student_pool(args, model, enc, task, traces, pools)
        sup.events, lost = map_events(kept, enc, task, traces, start)
        sup.rows, sup.mapper = safe_open(str(path), 'pt'), Words(enc)
        print('pools: ' + '; '.join(f'{p} teacher {len(pools[p])} heads, student {sup.pool[p]}' for p in PHASES))
        print(f'{sum(map(len, sup.events.values()))} events mapped, {lost} not mapped (dropped)')
    if args.kd:
        if load_tokenizer(args.teacher).get_vocab() != enc.tok.get_vocab():
            raise Fault(f'--kd: {args.teacher} and {args.student} have different tokenizers, so their logits are not of the same tokens')
        sup.kd, sup.teacher = args.kd, load_model(args.teacher, args.dtype, args.device, args.device_map)
        sup.teacher_past = prefix_kv(sup.teacher, enc) if start else ()
    dev, dev_events = [], {}
    if args.eval_every:
        dev, dev_traces = load_examples(args, task, enc, 'dev')
        finder = EventFinder(enc)
        for i, t in dev_traces.items():
            dev_events[i] = finder(i, t, len(enc.prefix) + len(enc.note(task.notes[i])))[0]

    # ---- precision: `model` runs forward and backward, `params` are what the optimiser moves
    barrier()
    if args.fsdp:
        if args.prefix == 'shared' or args.muon or args.precision == 'bf16-sr' or world() == 1:
            raise Fault('--fsdp needs torchrun with two ranks or more, AdamW, --prefix full or frozen, and --precision fp32, fp32-master or bf16')
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        if args.precision == 'bf16':
            model.to(torch.bfloat16)
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.precision == 'fp32-master' else MixedPrecisionPolicy()
        for block in model.probe_layers:
            fully_shard(block, mp_policy=half)
        fully_shard(model, mp_policy=half, reshard_after_forward=False)
        args.precision = 'fp32' if args.precision == 'fp32-master' else args.precision        # the shards are the masters
        exported = torch.bfloat16 if half.param_dtype or args.precision == 'bf16' else torch.float32
    master = args.precision in ('fp32-master', 'bf16-sr')
    params = [w.detach().clone().requires_grad_() for w in model.parameters()] if master else None
    if args.precision != 'fp32' and not args.fsdp:
        model.to(torch.bfloat16)
    for w in model.parameters():
        w.requires_grad_(True)
    params = params or list(model.parameters())
    if args.checkpoint:                                           # needs training mode; there is no dropout in either
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
        for m in model.modules():
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.0
            for k in ('attention_dropout', 'dropout_rate'):
                if isinstance(getattr(m, k, None), float):
                    setattr(m, k, 0.0)
    outer = {id(m.weight) for m in (*model.modules(), model.get_output_embeddings()) if isinstance(m, torch.nn.Embedding) or m is model.get_output_embeddings()}
    hidden = [w for w, m in zip(params, model.parameters()) if args.muon and m.ndim == 2 and id(m) not in outer]
    optim = Muon(params, hidden, lr=args.lr, betas=(0.9, 0.98), weight_decay=args.weight_decay)
    plan = batches(len(examples), args.batch, args.steps, args.seed, ordered=bool(args.data))
    pad = enc.eos[0] if enc.eos else 0
    resume, log, step0 = private_dir(out / 'resume') / 'state.safetensors', out / 'log.jsonl', 0
    if resume.exists():
        step0 = load_state(resume, model, params, optim)
        lines = log.read_text().splitlines()[:step0] if log.exists() else []
        log.write_text(''.join(x + '\n' for x in lines))
        print(f'resumed at step {step0}')
    best = min((x['dev'], x['step']) for x in map(json.loads, log.read_text().splitlines()) if 'dev' in x) if step0 >= args.eval_every > 0 else (float('inf'), -1)
    if args.batch < world():
        raise Fault(f'--batch {args.batch} is smaller than the {world()} ranks')
    began, seen, frozen = time.time(), 0, None

    def weights():
        """What is exported: the weights that run forward (every rank takes part)."""
        return {k: entire(v).to(exported) if args.fsdp and v.is_floating_point() else v for k, v in model.state_dict().items()}

    def collect():
        """Moves the compute copy's gradients to the masters', in fp32."""
        for m, w in zip(params, model.parameters()) if master else ():
            if w.grad is not None:
                m.grad = w.grad.float() if m.grad is None else m.grad.add_(w.grad.float())
                w.grad = None

    for step in range(step0, args.steps):
        share = min(1, (step + 1) / max(1, args.warmup), (args.steps - step) / max(1, int(args.decay * args.steps)))
        lr = args.lr * share
        for g in optim.param_groups:
            g['lr'] = share * (args.muon if g['hidden'] else args.lr)
        if args.prefix == 'frozen' and (frozen is None or step % args.refresh == 0):
            frozen = prefix_kv(model, enc)
        batch = [examples[i] for i in plan[step]]
        labels, count = sum(len(e['ids']) - e['n'] for e in batch), sup.count(batch)
        groups, ce_sum, kl_sum = {}, 0.0, 0.0
        for e in batch[rank()::world()]:
            groups.setdefault(id(e['prefix']), []).append(e)
        for group in groups.values():
            group.sort(key=lambda e: len(e['ids']))               # like lengths share a micro-batch: little padding
            prefix = group[0]['prefix']
            shared = SharedPrefix(model, prefix) if prefix and args.prefix == 'shared' else None
            past = shared.past if shared else frozen if prefix else ()
            for i in range(0, len(group), args.micro or len(group)):
                ce, kl = backward(model, group[i:i + (args.micro or len(group))], past, labels, sup, count, pad, len(prefix), world() if args.fsdp else 1)
                ce_sum, kl_sum = ce_sum + ce, kl_sum + kl
                collect()
                if shared:
                    shared.add()
            if shared:
                shared.backward()
                collect()
        if world() > 1 and not args.fsdp:
            for w in params:                                      # losses carry global counts, so gradients add up
                w.grad = torch.zeros_like(w) if w.grad is None else w.grad
                torch.distributed.all_reduce(w.grad)
        norm = float(entire(torch.nn.utils.clip_grad_norm_(params, args.clip)))
        if not np.isfinite(norm):
            raise Fault(f'step {step}: gradient norm is {norm}; the last resume point is kept')
        optim.step()
        optim.zero_grad(set_to_none=True)
        if master:
            with torch.no_grad():
                coin = torch.Generator(params[0].device).manual_seed(args.seed * 2 ** 32 + step)
                for m, w in zip(params, model.parameters()):
                    w.copy_(m if args.precision == 'fp32-master' else stochastic_round(m, coin))
                    if args.precision == 'bf16-sr':
                        m.copy_(w)                                # nothing finer than bf16 is remembered
        seen += sum(len(e['ids']) for e in batch)
        if world() > 1:                                           # the whole batch's losses, on every rank
            sums = torch.tensor([ce_sum, kl_sum], device=model.device)
            torch.distributed.all_reduce(sums)
            ce_sum, kl_sum = sums.tolist()
        record = {'step': step, 'ce': round(ce_sum, 6), 'kl': round(kl_sum, 6), 'lr': float(f'{lr:.3e}'), 'norm': round(norm, 4)}
        if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
            record |= evaluate_dev(model, dev, dev_events, prefix_kv(model, enc) if dev[0]['prefix'] else ())
            if record['dev'] < best[0]:
                best, state = (record['dev'], step), weights()
                if rank() == 0:
                    model.save_pretrained(out / 'resume' / 'best', state_dict=state)
        if rank() == 0:
            with log.open('a') as f:
                f.write(json.dumps(record) + '\n')
            if step % args.print_every == 0 or step + 1 == args.steps:
                rate, left = seen / (time.time() - began), (time.time() - began) / (step + 1 - step0) * (args.steps - step - 1)
                print(f'step {step:5d}/{args.steps}  ce {ce_sum:7.4f}  kl {kl_sum:7.4f}  lr {lr:.2e}  norm {norm:6.2f}  {rate:7.0f} tok/s  left {left:5.0f} s'
                      + ''.join(f'  {k} {record[k]:.3f}' for k in ('dev', *PHASES) if k in record), flush=True)
        if (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save_state(resume, model, params, optim, step + 1)

    state = weights()
    if rank() == 0:
        model.config._attn_implementation = 'sdpa' if getattr(model, '_supports_sdpa', True) else 'eager'
        model.save_pretrained(out, state_dict=state)
        if args.eval_every and best[1] != args.steps - 1:         # the exported weights are those that were evaluated
            for f in (out / 'resume' / 'best').glob('*.safetensors*'):
                shutil.copy(f, out / f.name)
        enc.tok.save_pretrained(out)
        shutil.rmtree(out / 'resume')                             # our own resume points, made above
        finish(out, 'distill')
        print(f'{out}: trained {args.steps} steps in {time.time() - began:.0f} s, last ce {ce_sum:.4f}, kl {kl_sum:.4f}'
              + (f', exported step {best[1]} with dev ce {best[0]:.4f}' if args.eval_every else '') + f'\nnext: python characterize.py --work {args.work} --model {out}')


def entire(x):
    """A tensor that FSDP may have split over the ranks, whole (every rank takes part)."""
    return x.full_tensor() if hasattr(x, 'full_tensor') else x


def like(x, value):
    """value (whole), split over the ranks as x is."""
    if not hasattr(x, 'full_tensor'):
        return value.to(x.device)
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(x.device), x.device_mesh, x.placements)


def save_state(path, model, params, optim, step):
    """Weights, masters and optimiser state in one safetensors file, whole or not at all."""
    t = {'step': torch.tensor(step)}
    for i, (w, m) in enumerate(zip(model.parameters(), params)):
        t[f'{i}.w'] = entire(w.data)
        if m is not w:
            t[f'{i}.m'] = m.data
        for k, v in optim.state[m].items():
            t[f'{i}.opt.{k}'] = entire(v)
    if rank() == 0:
        write_tensors(path, {k: v.clone() for k, v in t.items()})


def load_state(path, model, params, optim):
    """Puts save_state's tensors back, bit for bit and in their own dtype; returns the step to go on with."""
    with safe_open(str(path), 'pt') as f:
        with torch.no_grad():
            for i, (w, m) in enumerate(zip(model.parameters(), params)):
                w.copy_(like(w, f.get_tensor(f'{i}.w')))
                if m is not w:
                    m.copy_(f.get_tensor(f'{i}.m'))
        for key in f.keys():
            i, *rest = key.split('.')
            if rest[:1] == ['opt']:
                value = f.get_tensor(key)
                optim.state[params[int(i)]][rest[1]] = value if rest[1] == 'step' else like(params[int(i)], value)
        return int(f.get_tensor('step'))


if __name__ == '__main__':
    main()
