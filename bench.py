"""bench.py - what the rows cost beside one prefill and beside naive hooked forwards; what a training step costs beside its peers.

    python bench.py --model M --tokens 2048 --events 4 --out bench.jsonl
    python bench.py --model M --train --tokens 2048 --events 8 --batch 16      # distill.py's step: MISTILL over CoT, eager, shared prefix, TRL

Every figure is the best of --repeat runs in one process; compare ratios within a run, not seconds across machines. The
naive way (a full forward with a hook on the output projection for every head and event) is timed on --sample forwards and
extrapolated, and the record says so. Appends to --out: what, model, tokens, events, ours_s, peer, peer_s, ratio, max_abs_err, peak_mb.
"""
import argparse
import importlib.util
import json
import resource
import tempfile
import time

import torch
import torch.nn.functional as F

from common import PHASES, at_least, load_model, load_tokenizer, measure, prefill


def best(f, repeat):
    times = []
    for _ in range(repeat):
        t = time.perf_counter()
        out = f()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - t)
    return out, min(times)


def peak_mb(args):
    """The process's peak so far; a CPU has no other. Order measurements from small to large."""
    return torch.cuda.max_memory_allocated() / 2 ** 20 if args.device.startswith('cuda') else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 10


def say(args, records):
    with open(args.out, 'a', encoding='utf-8') as f:
        for r in records:
            f.write(json.dumps(r) + '\n')
            print(f'{r["what"]}: ours {r["ours_s"]:.2f} s, {r["peer"]} {r["peer_s"]:.2f} s, ratio {r["ratio"]:.2f}')


class Rows(dict):
    get_tensor = dict.__getitem__


def train(args, model):
    """distill.py's forward and backward (no optimiser): one sequence of --tokens with --events supervised decisions, CoT and
    MISTILL; the same attention loss read from eager attention with output_attentions; --batch short sequences behind a
    prefix --ratio times as long, in each of them and shared; and TRL's SFTTrainer where it is installed."""
    import distill
    (L, H, _), T, E = model.probe_shape, args.tokens, args.events
    vocab, g = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    model.requires_grad_(True)
    draw = lambda n: torch.randint(3, vocab, (n,), generator=g).tolist()
    one = {'id': '0', 'ids': draw(T), 'n': T // 2}
    W, layers = T // 2, [L // 3, L // 2, 2 * L // 3]
    sup = distill.Supervision(1.0, {'0': [(PHASES[j % 3], T // 2 + j * (T // 2 - 2) // E, j) for j in range(E)]}, {p: [(l, i % H) for l in layers] for i, p in enumerate(PHASES)},
                              Rows({'0': torch.rand(E, W, generator=g).softmax(1)}), lambda note, completion: ([torch.arange(T), torch.arange(T) * W // T, torch.ones(T)], W),
                              type('Task', (), {'notes': {'0': None}}), {'0': {'completion': None}})
    labels, count = T - one['n'], sup.count([one])

    def step(sup):
        model.zero_grad()
        return distill.backward(model, [one], (), labels, sup, count, 0)
    plain = distill.Supervision()
    step(plain)                                                   # warm
    _, cot_s = best(lambda: step(plain), args.repeat)
    cot_mb = peak_mb(args)
    loss, mistill_s = best(lambda: step(sup), args.repeat)
    mistill_mb = peak_mb(args)
    _, cot2_s = best(lambda: step(plain), args.repeat)            # before and after: the machine's drift
    cot_s = min(cot_s, cot2_s)

    def eager():
        model.zero_grad()
        out = model(input_ids=torch.tensor([one['ids']], device=model.device), output_attentions=True, use_cache=False)
        ce = F.cross_entropy(out.logits[0, one['n'] - 1:-1].float(), torch.tensor(one['ids'][one['n']:], device=model.device), reduction='sum') / labels
        kl = ce.new_zeros(())
        for phase, q, row in sup.events['0']:
            P = distill.word_mass(distill.pool_mean({l: out.attentions[l][:, :, q].float() for l in layers}, [sup.pool[phase]]), *sup.mapper(None, None))
            kl = kl + distill.attention_loss(sup.rows['0'][[row]].to(P.device), P).sum() / (count[phase] * sum(c > 0 for c in count.values()))
        (ce + kl).backward()
        return float(ce.detach()), float(kl.detach())
    model.set_attn_implementation('eager')
    eager_loss, eager_s = best(eager, args.repeat)
    eager_mb = peak_mb(args)
    model.set_attn_implementation('probe')
    base = {'model': args.model, 'tokens': T, 'events': E, 'max_abs_err': abs(loss[1] - eager_loss[1])}
    say(args, [{'what': f'training step, MISTILL over CoT (peak {mistill_mb / cot_mb:.3f} x)', **base, 'ours_s': mistill_s, 'peer': 'CoT', 'peer_s': cot_s, 'ratio': mistill_s / cot_s, 'peak_mb': mistill_mb},
               {'what': f'training step, eager with output_attentions over MISTILL (peak {eager_mb / mistill_mb:.3f} x)', **base, 'ours_s': mistill_s, 'peer': 'eager', 'peer_s': eager_s, 'ratio': eager_s / mistill_s, 'peak_mb': eager_mb}])

    t = max(8, T // (args.ratio + 1))
    prefix, part = draw(T - t), [{'id': str(i), 'ids': draw(t), 'n': t // 2} for i in range(args.batch)]
    labels = sum(len(e['ids']) - e['n'] for e in part)
    none = dict.fromkeys(PHASES, 0)

    def full():
        model.zero_grad()
        return sum(distill.backward(model, [{**e, 'ids': prefix + e['ids'], 'n': len(prefix) + e['n']}], (), labels, plain, none, 0)[0] for e in part)

    def shared():
        model.zero_grad()
        s = distill.SharedPrefix(model, prefix)
        total = 0.0
        for i in range(0, len(part), 4):
            total += distill.backward(model, part[i:i + 4], s.past, labels, plain, none, 0, len(prefix))[0]
            s.add()
        s.backward()
        return total
    a, shared_s = best(shared, 1)
    b, full_s = best(full, 1)
    say(args, [{'what': f'training step of {args.batch} sequences of {t} tokens, full over shared prefix of {len(prefix)}', 'model': args.model, 'tokens': T, 'events': 0, 'ours_s': shared_s, 'peer': 'prefix in every sequence',
                    'peer_s': full_s, 'ratio': full_s / shared_s, 'max_abs_err': abs(a - b), 'peak_mb': peak_mb(args)}])
    if importlib.util.find_spec('trl') and importlib.util.find_spec('datasets'):
        say(args, [trl(args, model, draw)])
    else:
        print('trl or datasets is not installed (requirements-bench.txt): not compared')


def trl(args, model, draw):
    """Seconds of a full-parameter step on the same sequences, prompt masked: TRL's SFTTrainer over the loop of distill.py."""
    import distill
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer
    steps, T = 4, args.tokens // 2
    part = [{'id': str(i), 'ids': draw(T), 'n': T // 2} for i in range(2)]
    params = [w for w in model.parameters()]
    optim = torch.optim.AdamW(params, lr=1e-6)

    def ours():
        for _ in range(steps):
            distill.backward(model, part, (), T, distill.Supervision(), dict.fromkeys(PHASES, 0), 0)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optim.step()
            optim.zero_grad(set_to_none=True)
    ours()
    _, ours_s = best(ours, 1)
    peer = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device)
    data = Dataset.from_list([{'input_ids': e['ids'], 'completion_mask': [0] * e['n'] + [1] * (T - e['n'])} for _ in range(steps + 1) for e in part])
    stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, *a, **k):
            stamps.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=2, learning_rate=1e-6, save_strategy='no', report_to=[], max_length=None, disable_tqdm=True,
                           gradient_checkpointing=False, bf16=False, fp16=False, completion_only_loss=True, use_cpu=args.device == 'cpu', logging_strategy='no', dataloader_pin_memory=False)
        SFTTrainer(model=peer, args=config, train_dataset=data, processing_class=load_tokenizer(args.model), callbacks=[Clock()]).train()
    peer_s = stamps[-1] - stamps[0]                               # the first step is warm-up, in both
    return {'what': f'{steps} optimiser steps of 2 x {T} tokens, TRL SFTTrainer over ours', 'model': args.model, 'tokens': T, 'events': 0, 'ours_s': ours_s, 'peer': 'trl', 'peer_s': peer_s,
            'ratio': peer_s / ours_s, 'max_abs_err': None, 'peak_mb': peak_mb(args)}


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--model', required=True, help='model folder, hub id or .gguf file')
    p.add_argument('--tokens', type=at_least(1), default=2048)
    p.add_argument('--events', type=at_least(1), default=4)
    p.add_argument('--train', action='store_true', help='the training step in place of the sweep')
    p.add_argument('--batch', type=at_least(1), default=16, help='with --train: sequences a step behind the shared prefix')
    p.add_argument('--ratio', type=at_least(1), default=20, help='with --train: tokens of the shared prefix over those of a sequence behind it')
    p.add_argument('--sample', type=at_least(1), default=4, help='naive forwards that are really run')
    p.add_argument('--repeat', type=at_least(1), default=3)
    p.add_argument('--rows', type=at_least(0), default=0, help='rows of one forward; 0: from free memory')
    p.add_argument('--dtype', default='float32')
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    p.add_argument('--out', default='bench.jsonl')
    args = p.parse_args()
    model = load_model(args.model, args.dtype, args.device)
    if args.train:
        return train(args, model)
    (L, H, D), T, E = model.probe_shape, args.tokens, args.events
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    query = [T - 1 - 20 * i for i in range(E)][::-1]
    event, mask = torch.arange(E).repeat_interleave(L * H), torch.eye(L * H, dtype=torch.bool).view(-1, L, H).repeat(E, 1, 1)
    bank, index = torch.zeros(1, L, H, D), torch.zeros(E * L * H, dtype=torch.long)

    def clean():
        with torch.no_grad():
            logits, probe = prefill(model, ids, keep_kv=True, head=(torch.tensor(query), None))
            return probe.kv, logits[0].float().topk(3).indices.tolist()
    (kv, top), prefill_s = best(clean, args.repeat)
    events = [{'query': q, 'target': t[0], 'foils': t[1:]} for q, t in zip(query, top)]      # top-1 against the next two
    (value, null), rows_s = best(lambda: measure(model, [kv], ids.tolist(), events, event, (mask, bank, index), rows=args.rows), args.repeat)

    blocks, picks = model.probe_layers, torch.linspace(0, L * H - 1, args.sample).long().tolist()
    err, began = 0.0, time.perf_counter()
    for n, i in enumerate(picks):
        (l, h), e = divmod(i, H), n % E
        attn = next(m for name, m in blocks[l].named_modules() if type(m).__name__.endswith('Attention'))
        out = getattr(attn, 'o_proj', None) or getattr(attn, 'c_proj', None) or attn.dense

        def zero(module, inputs):
            x = inputs[0].clone()
            x[:, query[e], h * D:(h + 1) * D] = 0
            return (x,)
        handle = out.register_forward_pre_hook(zero)
        with torch.no_grad():
            logits = model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=T - query[e]).logits[0, 0].float()
        handle.remove()
        err = max(err, abs(float(logits[top[e][0]] - logits[top[e][1:]].max()) - float(value[e * L * H + i])))
    naive_s = (time.perf_counter() - began) / len(picks) * E * L * H
    peak = peak_mb(args)
    base = {'model': args.model, 'tokens': T, 'events': E, 'ours_s': rows_s, 'max_abs_err': err, 'peak_mb': peak}
    records = [{'what': f'exact sweep of {L * H} heads beside one prefill', **base, 'peer': 'one prefill', 'peer_s': prefill_s, 'ratio': rows_s / prefill_s},
               {'what': f'exact sweep of {L * H} heads beside naive hooked forwards (extrapolated from {len(picks)})', **base, 'peer': 'naive', 'peer_s': naive_s, 'ratio': naive_s / rows_s}]
    say(args, records)
    print(f'largest difference from the naive margins {err:.1e}, where effects reach {float((null - value).abs().max()):.1f} logits; peak memory {peak:.0f} MB')


if __name__ == '__main__':
    main()
