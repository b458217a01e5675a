"""The engine against brute force, on tiny random models of every family."""
import copy

import numpy as np
import pytest
import torch
import transformers as tf

import common
from characterize import generate
from common import Fault, Probe, attach, attribution, margin, measure, prefill

BASE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
            max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXED = dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16)
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
FAMILIES = {
    'llama': tf.LlamaConfig(**BASE), 'llama3-rope': tf.LlamaConfig(**BASE, rope_parameters=LLAMA3), 'qwen2': tf.Qwen2Config(**BASE),
    'qwen3': tf.Qwen3Config(**BASE, head_dim=32), 'mistral': tf.MistralConfig(**BASE, sliding_window=16),
    'gemma2': tf.Gemma2Config(**BASE, **MIXED, attn_logit_softcapping=5.0, final_logit_softcapping=30.0),
    'gemma3': tf.Gemma3TextConfig(**BASE, **MIXED, layer_types=['sliding_attention', 'full_attention', 'sliding_attention']),
    'phi3': tf.Phi3Config(**BASE), 'gpt2': tf.GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=8, n_positions=512, initializer_range=0.3,
                                                         attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, bos_token_id=1, eos_token_id=2),
    'olmo2': tf.Olmo2Config(**BASE), 'granite': tf.GraniteConfig(**BASE, logits_scaling=3.0), 'starcoder2': tf.Starcoder2Config(**BASE, sliding_window=None),
}
T, P = 60, 20
QUERIES = (25, 40, 59)
EVENTS = [{'query': q, 'target': 5, 'foils': [7, 9]} for q in QUERIES]


def build(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation='eager').to(dtype).eval().requires_grad_(False)
    return model, torch.randint(3, 97, (T,), generator=torch.Generator().manual_seed(1))


def read(model, ids):
    """The note's segments (prefix, rest) and z at the queries (E,L,H,D)."""
    with torch.no_grad():
        first = prefill(model, ids[:P], keep_kv=True)[1].kv
        logits, probe = prefill(model, ids[P:], [first], keep_kv=True, z_at=torch.tensor(QUERIES) - P)
    return [first, probe.kv], logits[0], torch.stack([probe.z[l] for l in range(model.probe_shape[0])], 1)


class Hook:
    """Brute force: the full sequence again, z of one head at one position replaced on the way into the output projection."""

    def __init__(self, model, edits):
        self.model, self.edits = model, edits                    # {layer: [(position, head, value (D,))]}

    def __enter__(self):
        self.handles = []
        for l, block in enumerate(self.model.probe_layers):
            name, attn = next((n, m) for n, m in block.named_modules() if type(m).__name__.endswith('Attention'))
            out = getattr(attn, 'o_proj', None) or getattr(attn, 'c_proj')

            def pre(module, args, l=l):
                x = args[0].clone()
                D = self.model.probe_shape[2]
                for pos, h, value in self.edits.get(l, []):
                    x[:, pos, h * D:(h + 1) * D] = value
                return (x,)
            self.handles.append(out.register_forward_pre_hook(pre))

    def __exit__(self, *_):
        for h in self.handles:
            h.remove()


def m_of(logits, e):
    return float(logits[e['target']] - logits[e['foils']].max())


@pytest.mark.parametrize('family', FAMILIES)
def test_rows_equal_brute_force(family):
    model, ids = build(family)
    with torch.no_grad():
        eager = model(input_ids=ids[None]).logits[0]
    attach(model)
    past, logits, _ = read(model, ids)
    assert (logits - eager[P:]).abs().max() < 1e-4
    L, H, D = model.probe_shape
    assert (L, H) == (3, 8) and (D == 32) == (family == 'qwen3')  # faults 2, 3
    R = 3 * L * H
    event, mask = torch.arange(3).repeat_interleave(L * H), torch.eye(L * H, dtype=torch.bool).view(-1, L, H).repeat(3, 1, 1)
    bank = torch.randn(3, L, H, D, generator=torch.Generator().manual_seed(2)) * 3
    value, null = measure(model, past, ids.tolist(), EVENTS, event, (mask, bank, event))
    again, _ = measure(model, past, ids.tolist(), EVENTS, event, (mask, bank, event))
    plain, _ = measure(model, past, ids.tolist(), EVENTS, event, (mask, bank, event), restart=False, rows=50)
    assert torch.equal(value, again)                              # fault 8: nothing given was changed
    assert (value - plain).abs().max() < 1e-4                     # layer restart and chunking change nothing
    assert max(abs(m_of(eager[e['query']], e) - float(null[i * L * H])) for i, e in enumerate(EVENTS)) < 1e-4
    with torch.no_grad():
        for r in range(0, R, 5):
            e, (l, h) = EVENTS[event[r]], divmod(r % (L * H), H)
            with Hook(model, {l: [(e['query'], h, bank[event[r], l, h])]}):
                brute = m_of(model(input_ids=ids[None]).logits[0, e['query']], e)
            assert abs(brute - float(value[r])) < 1e-4
    assert (null - value).abs().max() > 1                         # effects worth the name
    assert len({round(float(x), 4) for x in (null - value)[:H]}) == H     # heads sharing KV differ (fault 2)


@pytest.mark.parametrize('family', FAMILIES)
def test_attribution_equals_full_autograd(family):
    model, ids = build(family)
    attach(model)
    past, _, z = read(model, ids)
    mu = torch.randn(z.shape, generator=torch.Generator().manual_seed(3))
    fast = attribution(model, past, ids.tolist(), EVENTS, z, mu)
    L, H, D = model.probe_shape
    for i, e in enumerate(EVENTS):
        delta = torch.zeros(L, T, H, D, requires_grad=True)
        logits = prefill(model, ids, delta=delta)[0][0, e['query']]
        margin(logits[None], torch.tensor([e['target']]), torch.zeros(1, 97, dtype=torch.bool).index_fill(1, torch.tensor(e['foils']), True)).sum().backward()
        slow = (delta.grad[:, e['query']] * (z[i] - mu[i])).sum(-1)
        assert ((fast[i] - slow).abs().max() / slow.abs().max()) < 1e-4


def test_integrated_gradient_is_complete():
    """The sum over heads of a many-point integrated gradient is the margin's change from all-mean to clean."""
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    mu = z + 0.3 * torch.randn(z.shape, generator=torch.Generator().manual_seed(3))
    a = attribution(model, past, ids.tolist(), EVENTS, z, mu, ig=400).sum((1, 2))
    ev = torch.arange(3)
    value, null = measure(model, past, ids.tolist(), EVENTS, ev, (torch.ones(3, *z.shape[1:3], dtype=torch.bool), mu, ev))
    assert (null - value).abs().max() > 0.5 and (a - (null - value)).abs().max() < 0.05


def test_keep_only_of_all_is_one_and_of_none_is_zero():
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    L, H, _ = model.probe_shape
    mu = torch.zeros(1, *z.shape[1:])
    masks = torch.stack([torch.zeros(L, H, dtype=torch.bool), torch.ones(L, H, dtype=torch.bool), torch.ones(L, H, dtype=torch.bool)])
    value, null = measure(model, past, ids.tolist(), EVENTS[:1], [0, 0, 0], (masks, mu, torch.zeros(3, dtype=torch.long)))
    recovery = (value - value[2]) / (null - value[2])
    assert abs(recovery[0] - 1) < 1e-5 and abs(recovery[1]) < 1e-6


def test_knock_in_of_a_note_into_itself_changes_nothing():
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    ev, mask = torch.arange(3), torch.ones(3, *z.shape[1:3], dtype=torch.bool)
    value, null = measure(model, past, ids.tolist(), EVENTS, ev, (mask, z, ev), pair=torch.tensor([[5, 7]] * 3))
    assert (value - null).abs().max() < 1e-4


def test_knock_in_by_position_across_lengths():             # fault 22: donor 47 tokens, recipient 30
    model, _ = build('llama')
    attach(model)
    g = torch.Generator().manual_seed(5)
    donor, rec = torch.randint(3, 97, (47,), generator=g), torch.randint(3, 97, (30,), generator=g)
    with torch.no_grad():
        z = torch.stack([prefill(model, donor, z_at=torch.tensor([46]))[1].z[l] for l in range(3)], 1)
        kv = prefill(model, rec, keep_kv=True)[1].kv
    e, mask = [{'query': 29, 'target': 5, 'foils': [7]}], torch.zeros(1, 3, 8, dtype=torch.bool)
    mask[0, 1, 3] = True
    value, _ = measure(model, [kv], rec.tolist(), e, [0], (mask, z, torch.tensor([0])))
    with torch.no_grad(), Hook(model, {1: [(29, 3, z[0, 1, 3])]}):
        assert abs(m_of(model(input_ids=rec[None]).logits[0, 29], e[0]) - float(value)) < 1e-4


def test_ablating_to_zero_is_zeroing_the_output_block():     # faults 1, 5
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    mask = torch.zeros(1, 3, 8, dtype=torch.bool)
    mask[0, 2, 3] = True                                         # last layer: only this position's own output matters
    value, _ = measure(model, past, ids.tolist(), EVENTS[:1], [0], (mask, torch.zeros(1, *z.shape[1:]), torch.tensor([0])))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[2].self_attn.o_proj.weight[:, 3 * 8:4 * 8] = 0
        assert abs(m_of(prefill(other, ids)[0][0, QUERIES[0]], EVENTS[0]) - float(value)) < 1e-4
        probe = Probe(model, z_at=torch.tensor([QUERIES[0]]), edit=(mask, torch.full((1, 3, 8, 8), 7.0), torch.tensor([0])), edit_at=torch.tensor([QUERIES[0]]))
        with probe:
            model(input_ids=ids[None])
    assert (probe.z[2][0, 3] == 7).all() and not (probe.z[2][0, 4] == 7).any()


@pytest.mark.parametrize('family', ['llama', 'gemma3', 'gpt2'])
def test_an_edit_in_the_clean_pass_equals_the_row(family):   # fault 6
    model, ids = build(family)
    attach(model)
    past, _, z = read(model, ids)
    mask = torch.zeros(3, *z.shape[1:3], dtype=torch.bool)
    mask[:, 1, 2:5] = True
    bank, ev = torch.randn(1, *z.shape[1:]), torch.arange(3)
    value, _ = measure(model, past, ids.tolist(), EVENTS, ev, (mask, bank, torch.zeros(3, dtype=torch.long)))
    for i, e in enumerate(EVENTS):
        with torch.no_grad():
            logits = prefill(model, ids, edit=(mask[:1], bank, torch.zeros(1, dtype=torch.long)), edit_at=torch.tensor([e['query']]))[0][0]
        assert abs(m_of(logits[e['query']], e) - float(value[i])) < 1e-4


@pytest.mark.parametrize('family', ['llama', 'mistral', 'gemma2', 'gemma3', 'gpt2'])
def test_attention_rows_equal_eager(family):                 # faults 15, 16: sums, softcap, exact zeros outside the window
    model, ids = build(family)
    with torch.no_grad():
        eager = model(input_ids=ids[None], output_attentions=True).attentions
    attach(model)
    q = torch.tensor(QUERIES)
    with torch.no_grad():
        probe = prefill(model, ids, attn_at=(torch.zeros_like(q), q))[1]
    windowed = {'mistral': (0, 1, 2), 'gemma2': (0, 2), 'gemma3': (0, 2)}.get(family, ())
    for l in range(3):
        assert (probe.attn[l] - eager[l][0][:, q].transpose(0, 1)).abs().max() < 1e-5
        assert (probe.attn[l].sum(-1) - 1).abs().max() < 1e-5
        for i, t in enumerate(QUERIES):
            assert (probe.attn[l][i, :, t + 1:] == 0).all()
            assert (probe.attn[l][i, :, :max(0, t - 15)] == 0).all() == (l in windowed)


def test_blocked_keys_get_no_attention_in_the_heads_named():
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    R, (L, H, _) = 2, model.probe_shape
    heads, keys = torch.zeros(R, L, H, dtype=torch.bool), torch.zeros(R, T, dtype=torch.bool)
    heads[1, 1, 2], keys[:, 5:30] = True, True
    pos = torch.tensor([40, 40])
    _, probe = common.row_forward(model, past, ids[pos], pos, torch.tensor([5, 7]), blocked=(heads, keys), attn_at=True)
    assert (probe.attn[1][1, 2, 5:30] == 0).all() and (probe.attn[1][0, 2, 5:30] > 0).all() and (probe.attn[1][1, 3, 5:30] > 0).all()
    value, null = measure(model, past, ids.tolist(), [{'query': 40, 'target': 5, 'foils': [7]}], [0, 0], blocked=(heads, keys))
    assert value[0] == null[0] and value[1] != null[1]


def test_right_padding_in_a_batch_changes_nothing():          # faults 11, 12
    for family in ('gpt2', 'gemma3'):
        model, ids = build(family)
        attach(model)
        batch = torch.zeros(2, 9, dtype=torch.long)
        batch[0, :5], batch[1] = ids[:5], ids[10:19]
        with torch.no_grad():
            both, alone = prefill(model, batch)[0], prefill(model, ids[:5])[0]
        assert (both[0, :5] - alone[0]).abs().max() < 1e-4 and torch.isfinite(both).all()
        with pytest.raises(ValueError, match='pad on the right'):
            model(input_ids=batch, attention_mask=torch.tensor([[0] * 4 + [1] * 5, [1] * 9]))


def test_bf16_effects_and_null_rows(tmp_path):                # faults 7, 10: own null row cancels what the kernels differ by
    model, ids = build('llama', torch.bfloat16)
    attach(model)
    past, _, z = read(model, ids)
    none = torch.zeros(3, *z.shape[1:3], dtype=torch.bool)
    value, null = measure(model, past, ids.tolist(), EVENTS, torch.arange(3), (none, z, torch.arange(3)))
    assert torch.equal(value, null)                              # a row without an edit has an effect of exactly zero
    common.write_tensors(tmp_path / 'z.safetensors', {'z': z.float()})
    assert np.isfinite(common.load_file(tmp_path / 'z.safetensors')['z'].numpy()).all()


def test_captured_shapes_in_a_batch_of_two():                # fault 4
    model, ids = build('llama')
    attach(model)
    q = torch.tensor([3, 7 + 20])                                 # flat positions: b * T + t
    with torch.no_grad():
        probe = prefill(model, ids[:40].view(2, 20), z_at=q, attn_at=(torch.tensor([0, 1]), torch.tensor([3, 7])))[1]
        alone = prefill(model, ids[20:40], z_at=q[1:] - 20, attn_at=(torch.tensor([0]), torch.tensor([7])))[1]
    for l in range(3):
        assert probe.z[l].shape == (2, 8, 8) and probe.attn[l].shape == (2, 8, 20)
        assert (probe.z[l][1] - alone.z[l][0]).abs().max() < 1e-5 and (probe.attn[l][1] - alone.attn[l][0]).abs().max() < 1e-5


def test_the_shared_prefix_is_never_written_to():             # fault 8
    model, ids = build('gemma3')
    attach(model)
    past, _, z = read(model, ids)
    before = [{l: (k.clone(), v.clone()) for l, (k, v) in seg.items()} for seg in past]
    list(generate(model, Words(ids[:P].tolist()), past[:1], [ids[20:30].tolist(), ids[30:36].tolist()], 8, batch=2))
    measure(model, past, ids.tolist(), EVENTS, torch.arange(3), (torch.ones(3, 3, 8, dtype=torch.bool), z, torch.arange(3)))
    attribution(model, past, ids.tolist(), EVENTS, z, torch.zeros_like(z))
    for a, b in zip(before, past):
        assert all(torch.equal(x, y) for l in a for x, y in zip(a[l], b[l]))


def test_the_output_head_sees_only_what_is_asked():           # fault 18
    model, ids = build('llama')
    attach(model)
    with torch.no_grad():
        full = prefill(model, ids)[0]
        cut = prefill(model, ids, head=(torch.tensor([3, 59]), torch.tensor([5, 7, 11])))[0]
    assert cut.shape == (1, 2, 3) and (cut[0] - full[0][[3, 59]][:, [5, 7, 11]]).abs().max() < 1e-5


def test_the_probe_leaves_nothing_behind_after_an_exception():
    model, ids = build('llama')
    attach(model)
    before = prefill(model, ids)[0]
    with pytest.raises(RuntimeError, match='inside'):
        with Probe(model, head=(torch.tensor([0]), None), restart=(torch.tensor([0]), torch.tensor([-1])), delta=torch.ones(3, 1, 1, 1)):
            raise RuntimeError('inside')
    assert Probe.active is None and torch.equal(prefill(model, ids)[0], before)
    assert all(not b._forward_pre_hooks for b in model.probe_layers)


def test_a_cache_made_with_gradient_can_be_used_again():      # fault 13
    model, ids = build('llama')
    attach(model)
    model.requires_grad_(True)
    past = [prefill(model, ids, keep_kv=True)[1].kv]
    ev = torch.arange(3)
    for _ in range(2):
        value, null = measure(model, past, ids.tolist(), EVENTS, ev, (torch.ones(3, 3, 8, dtype=torch.bool), torch.zeros(1, *model.probe_shape), torch.zeros(3, dtype=torch.long)))
        assert not value.requires_grad and torch.isfinite(value).all()
        copy.deepcopy({l: [x.detach() for x in kv] for l, kv in past[0].items()})


def test_attribution_under_gradient_checkpointing():          # fault 19
    model, ids = build('llama')
    attach(model)
    past, _, z = read(model, ids)
    plain = attribution(model, past, ids.tolist(), EVENTS, z, torch.zeros_like(z))
    model.requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    again = attribution(model, past, ids.tolist(), EVENTS, z, torch.zeros_like(z))
    assert (plain - again).abs().max() / plain.abs().max() < 1e-5


def test_memory_of_the_clean_pass_is_linear():                # fault 17: largest tensor of the masked path, 1k against 4k
    sizes = {}
    for n in (1024, 4096):
        largest = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                if torch.is_tensor(out):
                    largest = max(largest, out.numel() * out.element_size())
                return out
        q, k = torch.randn(1, 8, n, 8), torch.randn(1, 2, n + 16, 8)
        with Watch(), torch.no_grad():
            common.causal(q, k, k, 16, 0.3)
        sizes[n] = largest
    assert sizes[4096] <= 4.5 * sizes[1024]


def test_unsupported_attention_is_named():
    config = tf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(Fault, match='BloomAttention'):
        attach(tf.AutoModelForCausalLM.from_config(config))
    with pytest.raises(Fault, match='MambaMixer'):
        attach(tf.AutoModelForCausalLM.from_config(tf.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)))


class Words:
    """What generate() asks of an Encoder."""
    eos = (2,)

    def __init__(self, prefix):
        self.prefix = prefix

    def note(self, n):
        return n


@pytest.mark.parametrize('family', ['llama', 'gemma3', 'gpt2'])
def test_batched_generation_equals_one_at_a_time(family):     # and equals taking the argmax of the whole sequence each time
    model, ids = build(family)
    attach(model)
    enc, notes = Words(ids[:P].tolist()), [ids[20:25].tolist(), ids[30:39].tolist(), ids[40:52].tolist()]
    prefix = [prefill(model, ids[:P], keep_kv=True)[1].kv]
    batched = list(generate(model, enc, prefix, notes, 24, batch=3))
    for note, (out, cut) in zip(notes, batched):
        seq = enc.prefix + note
        with torch.no_grad():
            while len(seq) < P + len(note) + 24:
                seq.append(int(prefill(model, seq)[0][0, -1].argmax()))
                if seq[-1] == 2:
                    break
        want = seq[P + len(note):]
        assert out == [t for t in want if t != 2] and cut == (want[-1] != 2)     # fault 30
