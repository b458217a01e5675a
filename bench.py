"""bench.py - what the rows cost: the exact sweep over every head beside one prefill and beside naive hooked forwards.

    python bench.py --model M --tokens 2048 --events 4 --out bench.jsonl

Every figure is the best of --repeat runs in one process; compare ratios within a run, not seconds across machines. The
naive way (a full forward with a hook on the output projection for every head and event) is timed on --sample forwards and
extrapolated, and the record says so. Appends to --out: what, model, tokens, events, ours_s, peer, peer_s, ratio, max_abs_err, peak_mb.
"""
import argparse
import json
import resource
import time

import torch

from common import load_model, measure, prefill


def best(f, repeat):
    times = []
    for _ in range(repeat):
        t = time.perf_counter()
        out = f()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - t)
    return out, min(times)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--model', required=True, help='model folder, hub id or .gguf file')
    p.add_argument('--tokens', type=int, default=2048)
    p.add_argument('--events', type=int, default=4)
    p.add_argument('--sample', type=int, default=4, help='naive forwards that are really run')
    p.add_argument('--repeat', type=int, default=3)
    p.add_argument('--rows', type=int, default=0, help='rows of one forward; 0: from free memory')
    p.add_argument('--dtype', default='float32')
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    p.add_argument('--out', default='bench.jsonl')
    args = p.parse_args()
    model = load_model(args.model, args.dtype, args.device)
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
    peak = torch.cuda.max_memory_allocated() / 2 ** 20 if args.device.startswith('cuda') else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 10
    base = {'model': args.model, 'tokens': T, 'events': E, 'ours_s': rows_s, 'max_abs_err': err, 'peak_mb': peak}
    records = [{'what': f'exact sweep of {L * H} heads beside one prefill', **base, 'peer': 'one prefill', 'peer_s': prefill_s, 'ratio': rows_s / prefill_s},
               {'what': f'exact sweep of {L * H} heads beside naive hooked forwards (extrapolated from {len(picks)})', **base, 'peer': 'naive', 'peer_s': naive_s, 'ratio': naive_s / rows_s}]
    with open(args.out, 'a', encoding='utf-8') as f:
        for r in records:
            f.write(json.dumps(r) + '\n')
            print(f'{r["what"]}: ours {r["ours_s"]:.2f} s, {r["peer"]} {r["peer_s"]:.2f} s, ratio {r["ratio"]:.2f}')
    print(f'largest difference from the naive margins {err:.1e}, where effects reach {float((null - value).abs().max()):.1f} logits; peak memory {peak:.0f} MB')


if __name__ == '__main__':
    main()
