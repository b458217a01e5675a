"""The training loop: words across tokenizers, the attention loss, precision, batches, resume."""
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import distill
from common import attach, prefill
from test_engine import FAMILIES, build
from test_smoke import run


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
        loss = distill.attention_loss(wanted, distill.pool_words(attn, heads, maps, W)).sum()
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
    distill.attention_loss(wanted, distill.pool_words(attn, [(1, 2)], [torch.arange(60), torch.arange(60), torch.ones(60)], 60)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_batches_are_a_function_of_seed_and_step():
    a = distill.batches(10, 4, 8, 3, False)
    assert a == distill.batches(10, 4, 8, 3, False) and a[:5] == distill.batches(10, 4, 5, 3, False) and a != distill.batches(10, 4, 8, 4, False)
    flat = np.concatenate(a)
    assert sorted(flat[:10]) == list(range(10))                   # an epoch sees every example once
    assert distill.batches(3, 2, 3, 0, True) == [[0, 1], [2, 0], [1, 2]]


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    w = tmp_path_factory.mktemp('d') / 'toy'
    run('data/toy/prepare.py', '--work', w, '--regions', 2, '--leaves', 2, '--notes', 'train=6,discovery=1', '--train', 'short=1')
    return w


def train(w, name, *more):
    run('distill.py', '--work', w, '--student', w / 'init/student', '--scratch', '--traces', w / 'gold.jsonl', '--name', name, '--steps', 6, '--batch', 4, *more)
    return (w / 'students' / name / 'model.safetensors').read_bytes(), [json.loads(x)['ce'] for x in open(w / 'students' / name / 'log.jsonl')]


@pytest.mark.parametrize('precision', ['fp32', 'fp32-master', 'bf16'])
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
