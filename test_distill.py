"""The training loop: words across tokenizers, the attention loss, precision, batches, resume."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import distill
from common import PHASES, attach, prefill
from test_engine import FAMILIES, P, build
from test_smoke import HERE, run


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet='ab c\n', min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_every_token_is_shared_out_whole(text, rng):
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 6)) + [0, len(text)])
    offs = [(a, b) for a, b in zip(cuts, cuts[1:]) if a < b]
    units = distill.words(text)
    token, word, weight = distill.token_words(offs, units)
    for t, (s, e) in enumerate(offs):
        mine = token == t
        assert (abs(weight[mine].sum() - 1) < 1e-6) == bool(text[s:e].strip())
        for w, x in zip(word[mine], weight[mine]):
            overlap = min(e, units[w][1]) - max(s, units[w][0])
            assert overlap > 0 and abs(x - overlap / sum(max(0, min(e, b) - max(s, a)) for a, b in units)) < 1e-6


def test_pooled_attention_gradient_equals_eager():
    """The loss read beside sdpa against the same loss on eager attention weights: value and gradient."""
    model, ids = build('llama')
    model.requires_grad_(True)
    heads, q = [(1, 2), (2, 5)], torch.tensor([30, 59])
    maps, W = [torch.arange(60), torch.arange(60) // 3, torch.ones(60)], 20
    wanted = torch.rand(2, W, generator=torch.Generator().manual_seed(0)).softmax(1)
    grads = []
    for eager in (True, False):
        if eager:
            attn = {l: a[0][:, q].transpose(0, 1) for l, a in enumerate(model(input_ids=ids[None], output_attentions=True).attentions)}
        else:
            attach(model)
            attn = prefill(model, ids, attn_at=(torch.zeros_like(q), q), attn_layers={1, 2})[1].attn
        loss = distill.attention_loss(wanted, distill.word_mass(distill.pool_mean(attn, [heads] * 2), maps, W)).sum()
        grads.append((loss, torch.autograd.grad(loss, [p for n, p in model.named_parameters() if 'q_proj' in n or 'k_proj' in n], allow_unused=True)))
    assert abs(grads[0][0] - grads[1][0]) < 1e-4 * abs(grads[0][0])
    for a, b in zip(grads[0][1], grads[1][1]):
        assert a is None and b is None or (a - b).abs().max() <= 1e-4 * a.abs().max()


def test_gradient_is_finite_where_attention_is_exactly_zero():     # fault 38
    model, ids = build('mistral')
    attach(model)
    model.requires_grad_(True)
    q = torch.tensor([59])
    attn = prefill(model, ids, attn_at=(torch.zeros_like(q), q))[1].attn
    wanted = torch.full((1, 60), 1 / 60)
    distill.attention_loss(wanted, distill.word_mass(distill.pool_mean(attn, [[(1, 2)]]), [torch.arange(60), torch.arange(60), torch.ones(60)], 60)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ------------------------------------------------------------------------------------------------ one step's gradient

class Rows(dict):
    get_tensor = dict.__getitem__


def lesson(lam=0.5):
    """Three examples of unequal length behind one prefix, with decisions of every phase, and what supervises them."""
    rng = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 97, (P,), generator=rng).tolist()
    examples, events, rows, traces = [], {}, Rows(), {}
    for i, (length, n) in enumerate(((9, 8), (17, 8), (30, 11))):
        examples.append({'id': str(i), 'ids': torch.randint(3, 97, (length,), generator=rng).tolist(), 'n': n})
        events[str(i)] = [(PHASES[j % 3], q, j) for j, q in enumerate(range(n - 1, length - 1, 4))]
        rows[str(i)] = torch.rand(len(events[str(i)]), 8, generator=rng).softmax(1)
        traces[str(i)] = {'completion': i}
    length = lambda i: P + len(examples[i]['ids'])

    def mapper(note, completion):
        t = torch.arange(length(completion))
        return [t, t * 8 // len(t), torch.ones(len(t))], 8
    return prefix, examples, distill.Supervision(lam, events, {'coarse': [(0, 1), (1, 2)], 'fine': [(1, 5)], 'contrast': [(2, 0), (1, 2)]}, rows, mapper, type('T', (), {'notes': dict.fromkeys(traces)}), traces)


def gradients(model, mode='full', micro=1, lam=0.5, checkpoint=False, only=None):
    """{name: gradient} of one step over lesson()."""
    prefix, examples, sup = lesson(lam)
    labels, count = sum(len(e['ids']) - e['n'] for e in examples), sup.count(examples)
    model.requires_grad_(True).zero_grad()
    if checkpoint:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    shared, start = (distill.SharedPrefix(model, prefix), P) if mode == 'shared' else (None, 0)
    if not shared:
        examples = [{**e, 'ids': prefix + e['ids'], 'n': P + e['n']} for e in examples]
        sup.events = {i: [(p, P + q, row) for p, q, row in x] for i, x in sup.events.items()}
    examples = examples[only] if only else examples
    loss = np.zeros(2)
    for i in range(0, len(examples), micro):
        loss += distill.backward(model, examples[i:i + micro], shared.past if shared else (), labels, sup, count, 2, start)
        if shared:
            shared.add()
    if shared:
        shared.backward()
    model.eval()
    model.gradient_checkpointing_disable()
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}, loss


def same(a, b, relative):
    assert a.keys() == b.keys()
    for n in a:
        assert (a[n] - b[n]).norm() <= relative * max(1e-4, a[n].norm()), n


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'gemma2', 'gemma3', 'gpt2', 'granite'])
def test_a_shared_prefix_and_checkpointing_give_the_full_gradient(family):     # faults 39, 40, 33
    """Every parameter's gradient, cross-entropy and attention loss together: the prefix run once a step against the prefix in
    every sequence; checkpointed layers against plain ones; micro-batches of one against one batch."""
    model = attach(build(family)[0])
    model.requires_grad_(True)
    full, loss = gradients(model)
    assert loss[0] > 0 and loss[1] > 0
    for kind in ({'mode': 'shared'}, {'mode': 'shared', 'checkpoint': True}, {'checkpoint': True}, {'micro': 3}, {'mode': 'shared', 'micro': 2}):
        other, again = gradients(model, **kind)
        assert np.allclose(loss, again, rtol=1e-5), kind
        same(full, other, 1e-5)
    plain = gradients(model, lam=0)[0]                            # the attention loss has a gradient, also under checkpointing
    q = next(n for n in full if 'q_proj' in n or 'c_attn' in n)
    assert (full[q] - plain[q]).norm() > 1e-3 * plain[q].norm()


def test_ranks_add_up_to_one_batch():                             # fault 34: each rank its share, global counts
    model = attach(build('llama')[0])
    whole = gradients(model)[0]
    parts = [gradients(model, only=slice(r, None, 2))[0] for r in range(2)]
    same(whole, {n: parts[0][n] + parts[1][n] for n in whole}, 1e-5)


@pytest.mark.parametrize('family', FAMILIES)
def test_chunked_cross_entropy_equals_the_models_own(family, monkeypatch):
    """Soft caps and logit scales are applied after the head: loss and gradient of the hidden states' chunks against logits."""
    model, ids = build(family)
    attach(model)
    model.requires_grad_(True)
    own = torch.nn.functional.cross_entropy(prefill(model, ids)[0][0, :-1].float(), ids[1:], reduction='sum')
    wanted = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
    for chunk in (2 ** 26, 97 * 7):
        monkeypatch.setattr(distill, 'CHUNK', chunk)
        hidden = prefill(model, ids, head=(torch.arange(59), 'hidden'))[1].hidden
        loss = distill.cross_entropy(model, hidden, ids[1:])
        assert abs(float(loss - own)) < 1e-4 * float(own)
        for a, b in zip(wanted, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)):
            assert (a is None) == (b is None) and (a is None or (a - b).norm() <= 1e-4 * max(1e-3, float(a.norm())))


def test_logit_distillation_over_padded_vocabularies(work, monkeypatch):        # fault 26
    """Teacher and student that differ in padding rows alone: equal to the plain KL over the tokens both have; a teacher with
    another tokenizer is refused."""
    import transformers
    model, ids = build('llama')
    attach(model).requires_grad_(True)
    config = FAMILIES['llama'].to_dict() | {'vocab_size': 128}
    torch.manual_seed(5)
    teacher = attach(transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval())
    with torch.no_grad():
        soft = prefill(teacher, ids, head=(torch.arange(59), 'hidden'))[1].hidden
        wanted = prefill(teacher, ids)[0][0, :-1, :97].log_softmax(-1)
    mine = prefill(model, ids)[0][0, :-1]
    plain = torch.nn.functional.cross_entropy(mine, ids[1:], reduction='sum') + 0.5 * (wanted.exp() * (wanted - mine.log_softmax(-1))).sum()
    for chunk in (2 ** 26, 97 * 7):
        monkeypatch.setattr(distill, 'CHUNK', chunk)
        hidden = prefill(model, ids, head=(torch.arange(59), 'hidden'))[1].hidden
        assert distill.cross_entropy(model, hidden, ids[1:], (teacher, soft), 0.5).item() == pytest.approx(plain.item(), rel=1e-5)
    out = run('distill.py', '--work', work, '--student', work / 'init/student', '--scratch', '--teacher', work / 'init/teacher', '--traces', work / 'gold.jsonl', '--name', 'kd', '--kd', 1, ok=False)
    assert 'different tokenizers' in out


def test_stochastic_rounding_keeps_the_mean():
    x = torch.full((200_000,), 1 + 0.3 * 2 ** -7)                 # three tenths of the way to the next bf16
    y = distill.stochastic_round(x, torch.Generator().manual_seed(0))
    assert y.dtype == torch.bfloat16 and set(y.float().tolist()) == {1.0, 1 + 2 ** -7}
    assert abs(float((y.float() > 1).float().mean()) - 0.3) < 0.01
    assert torch.equal(distill.stochastic_round(torch.tensor([1.5, -2.0]), torch.Generator()).float(), torch.tensor([1.5, -2.0]))


def test_muon_moves_as_torchs_own():
    """Hidden matrices as torch.optim.Muon moves them (which rounds to bf16), the others as AdamW does, bit for bit."""
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=rng) for s in ((24, 16), (16, 40), (24, 16), (9,), (30, 16))]
    grads = [[torch.randn(w.shape, generator=rng) for w in start] for _ in range(3)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    optims = [distill.Muon(ours, ours[:3], lr=0.02, weight_decay=0.1)], [torch.optim.Muon(theirs[:3], lr=0.02, weight_decay=0.1), torch.optim.AdamW(theirs[3:], lr=0.02, weight_decay=0.1)]
    for g in grads:
        for ws, movers in zip((ours, theirs), optims):
            for w, x in zip(ws, g):
                w.grad = x.clone()
            for o in movers:
                o.step()
    for w, a, b in zip(start, ours, theirs):
        moved = (b - w).norm()
        assert (a - b).norm() < 0.05 * moved if w.ndim == 2 and w is not start[4] else torch.equal(a, b)


def test_batches_are_a_function_of_seed_and_step():
    a = distill.batches(10, 4, 8, 3, False)
    assert a == distill.batches(10, 4, 8, 3, False) and a[:5] == distill.batches(10, 4, 5, 3, False) and a != distill.batches(10, 4, 8, 4, False)
    flat = np.concatenate(a)
    assert sorted(flat[:10]) == list(range(10))                   # an epoch sees every example once
    assert distill.batches(3, 2, 3, 0, True) == [[0, 1], [2, 0], [1, 2]]


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    w = tmp_path_factory.mktemp('d') / 'toy'
    run('data/toy/prepare.py', '--work', w, '--regions', 2, '--leaves', 2, '--notes', 'train=6,discovery=1', '--train', 'short=1,long=48')
    return w


def train(w, name, *more):
    run('distill.py', '--work', w, '--student', w / 'init/student', '--scratch', '--traces', w / 'gold.jsonl', '--name', name, '--steps', 6, '--batch', 4, *more)
    return (w / 'students' / name / 'model.safetensors').read_bytes(), [json.loads(x)['ce'] for x in open(w / 'students' / name / 'log.jsonl')]


@pytest.mark.parametrize('precision', ['fp32', 'fp32-master', 'bf16', 'bf16-sr'])
def test_resume_after_a_kill_is_bit_for_bit(work, precision, monkeypatch):     # faults 28, 35
    whole = train(work, f'whole-{precision}', '--precision', precision)
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def killed(*a, **k):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return clip(*a, **k)
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', killed)
    with pytest.raises(KeyboardInterrupt):
        train(work, f'cut-{precision}', '--precision', precision, '--save-every', 3)
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', clip)
    assert not (work / 'students' / f'cut-{precision}' / 'model.safetensors').exists()
    assert train(work, f'cut-{precision}', '--precision', precision, '--save-every', 3) == whole
    assert whole[1][-1] < whole[1][0]


def test_micro_batches_and_a_frozen_prefix_of_no_tokens_train_alike(work):     # fault 33: unequal lengths, one global count
    one, four = train(work, 'one', '--precision', 'fp32'), train(work, 'four', '--precision', 'fp32', '--micro', 1)
    assert np.allclose(one[1], four[1], atol=1e-4)
    frozen = train(work, 'frozen', '--precision', 'fp32', '--prefix', 'frozen', '--refresh', 1)
    assert abs(frozen[1][0] - one[1][0]) < 1e-4                   # the same forward; only the prefix's gradient is missing


def test_records_with_a_list_of_their_own_share_it_exactly(work, tmp_path):
    """--data records with "prefix": run once a group (--prefix shared) or in every sequence (full), the losses agree."""
    rows = [json.loads(x) for x in open(work / 'train/long.jsonl')]
    assert len({r['prefix'] for r in rows[:24]}) == 3
    for mode in ('full', 'shared'):
        run('distill.py', '--work', work, '--student', work / 'init/teacher', '--scratch', '--data', work / 'train/long.jsonl', '--name', f'own-{mode}', '--precision', 'fp32',
            '--steps', 4, '--batch', 24, '--micro', 5, '--prefix', mode, '--muon', 0.02)
    a, b = ([json.loads(x) for x in open(work / f'students/own-{m}/log.jsonl')] for m in ('full', 'shared'))
    assert [x['ce'] for x in a] == pytest.approx([x['ce'] for x in b], abs=2e-4) and a[-1]['ce'] < a[0]['ce']
    bad = tmp_path / 'bad.jsonl'
    bad.write_text('{"prompt": "a", "completion": "b", "prefix": 3}\n')
    assert 'bad.jsonl:1: "prefix" should be str' in run('distill.py', '--work', work, '--student', work / 'init/teacher', '--scratch', '--data', bad, '--name', 'y', ok=False)
    assert '--data has its own' in run('distill.py', '--work', work, '--student', work / 'init/teacher', '--data', work / 'train/long.jsonl', '--name', 'x', '--prefix', 'frozen', ok=False)


def test_two_ranks_train_as_one(work, tmp_path):                  # fault 34, run
    """torchrun with 2 processes (gloo), each rank whole and FSDP2, in fp32 and with masters: the loss curve of one process."""
    more = ('--steps', 6, '--batch', 4, '--micro', 1, '--scratch', '--lr', 1e-3, '--warmup', 1)
    for n, (precision, fsdp) in enumerate((('fp32', ()), ('fp32', ('--fsdp',)), ('fp32-master', ('--fsdp', '--save-every', '3')))):
        if precision == 'fp32' and not fsdp:
            alone = train(work, 'alone', '--precision', 'fp32', *more)[1]
        command = ['distill.py', '--work', work, '--student', work / 'init/student', '--traces', work / 'gold.jsonl', '--name', f'ranks{n}', '--precision', precision, *more, *fsdp]
        done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', *map(str, command)],
                              cwd=HERE, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert not done.returncode, done.stderr[-3000:]
        curve = [json.loads(x)['ce'] for x in open(work / 'students' / f'ranks{n}' / 'log.jsonl')]
        assert np.allclose(curve, alone, atol=2e-4 if precision == 'fp32' else 5e-2), (precision, fsdp, curve, alone)
        import common
        model = common.load_model(work / 'students' / f'ranks{n}')
        assert all(torch.isfinite(w).all() for w in model.parameters())


def test_ranks_leave_their_process_group(tmp_path):
    """A group left open at exit aborts about every second two-rank run (gloo: "terminate called without an active exception")."""
    script = tmp_path / 'ends.py'
    script.write_text("import atexit, torch.distributed as dist\n"
                      "atexit.register(lambda: print('left open' if dist.is_initialized() else 'left'))     # registered first, so run last\n"
                      "import common\ncommon.barrier()\nassert dist.is_initialized()\n")
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', str(script)], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(HERE)})
    assert not done.returncode, done.stderr[-3000:]
    assert done.stdout.count('left') == 2 and 'open' not in done.stdout, done.stdout


def test_a_sequence_over_the_limit_names_its_note(work):          # fault 23
    out = run('distill.py', '--work', work, '--student', work / 'init/student', '--scratch', '--traces', work / 'gold.jsonl', '--name', 'long', '--max-len', 30, ok=False)
    assert 'train-000' in out and '--max-len' in out


def test_tied_and_untied_weights_save_and_load(tmp_path):         # fault 27
    import transformers
    for tie in (True, False):
        config = FAMILIES['llama'].__class__(**{**FAMILIES['llama'].to_dict(), 'tie_word_embeddings': tie})
        model = attach(transformers.AutoModelForCausalLM.from_config(config).eval())
        model.save_pretrained(tmp_path / str(tie))
        again = attach(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(tie)).eval())
        ids = torch.arange(3, 20)
        assert torch.equal(prefill(model, ids)[0], prefill(again, ids)[0])


def test_what_moves_at_a_small_rate_and_every_dtype(work, monkeypatch):         # fault 36
    """At a learning rate of 1e-5 most bf16 weights do not move in a step; an fp32 master does, all of it, and both arms
    start from the same first-step loss."""
    moved, first, seen = {}, {}, {}
    step = torch.optim.AdamW.step

    def spy(self, *a, **k):
        before = [w.detach().clone() for g in self.param_groups for w in g['params']]
        out = step(self, *a, **k)
        after = [w for g in self.param_groups for w in g['params']]
        live = [(x, y) for x, y, w in zip(before, after, after) if w.grad is not None]
        seen.setdefault('share', []).append(sum(int((x != y)[y.grad != 0].sum()) for x, y in live) / sum(int((y.grad != 0).sum()) for x, y in live))
        seen['dtypes'] = {w.dtype for w in after}, {w.grad.dtype for _, w in live}, {v.dtype for s in self.state.values() for k, v in s.items() if k != 'step'}
        return out
    monkeypatch.setattr(torch.optim.AdamW, 'step', spy)
    for precision in ('bf16', 'fp32-master', 'fp32', 'bf16-sr'):
        seen.clear()
        _, ce = train(work, f'small-{precision}', '--precision', precision, '--lr', 1e-5, '--warmup', 1)
        moved[precision], first[precision] = seen['share'][0], ce[0]
        want = torch.bfloat16 if precision == 'bf16' else torch.float32
        assert seen['dtypes'] == ({want}, {want}, {want})
        from safetensors.torch import load_file
        exported = {v.dtype for v in load_file(work / 'students' / f'small-{precision}' / 'model.safetensors').values()}
        assert exported == {torch.float32 if precision == 'fp32' else torch.bfloat16}     # what is evaluated is what ran
    assert first['bf16'] == first['fp32-master'] == first['bf16-sr']
    assert moved['bf16'] < 0.5 and moved['fp32-master'] > 0.95 and moved['fp32'] > 0.95, moved


def test_the_weights_of_the_best_dev_loss_are_exported(tmp_path):
    w = tmp_path / 'w'
    run('data/toy/prepare.py', '--work', w, '--regions', 2, '--leaves', 2, '--notes', 'train=4,dev=4,discovery=1', '--train', 'short=1')
    out = run('distill.py', '--work', w, '--student', w / 'init/student', '--scratch', '--traces', w / 'gold.jsonl', '--name', 'dev', '--precision', 'fp32',
              '--steps', 40, '--batch', 4, '--eval-every', 5, '--decay', 0.02, '--lr', 1e-2)
    log = [json.loads(x) for x in open(w / 'students/dev/log.jsonl')]
    dev = {x['step']: x['dev'] for x in log if 'dev' in x}
    best = min(dev, key=dev.get)
    assert sorted(dev) == list(range(4, 40, 5)) and best < 39 and f'exported step {best}' in out    # four notes are learned by heart
    assert all(0 <= x[p] <= 1 for x in log if 'dev' in x for p in PHASES if p in x)
    import common
    task, model = common.load_task(w), common.load_model(w / 'students/dev')
    enc = common.load_encoder(w / 'students/dev', model, task)
    args = type('A', (), {'data': None, 'traces': w / 'gold.jsonl', 'split': 'train', 'limit': 0, 'prefix': 'full', 'max_len': 0})
    examples = distill.load_examples(args, task, enc, 'dev')[0]
    assert distill.evaluate_dev(model, examples, {}, ())['dev'] == pytest.approx(dev[best], abs=1e-5)


def test_exactly_the_completion_and_its_end_are_supervised(work):               # faults 24, 25
    import common
    from transformers import AutoTokenizer
    task, tok = common.load_task(work), AutoTokenizer.from_pretrained(work / 'init/teacher')
    tok.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} Trace{% endif %}"
    assert tok.pad_token_id in (None, tok.eos_token_id)
    for chat in (False, True):
        enc = common.Encoder(tok, task, chat)
        args = type('A', (), {'data': None, 'traces': work / 'gold.jsonl', 'split': 'train', 'limit': 0, 'prefix': 'full', 'max_len': 0})
        examples, traces = distill.load_examples(args, task, enc)
        for e in examples:
            text = traces[e['id']]['completion']
            assert tok.decode(e['ids'][e['n']:-1]) == text and e['ids'][-1] == tok.eos_token_id
            assert e['ids'].count(tok.bos_token_id) == chat       # the template's own, and no second one
