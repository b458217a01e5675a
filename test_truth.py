"""Ground truth: what the characterization finds on a model small enough to search by brute force, on dead heads, on nothing."""
import itertools
import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import ablate
import common
from common import PHASES, by_note, loo_means, mean_interval, random_sets, ratio_interval
from data.toy.prepare import FINDINGS, LETTERS, NOISE, QUALIFIERS, tokenizer
from test_smoke import run

CODE = {(q, f): f'{LETTERS[i]}{j}{(3 * i + j) % 10}' for i, f in enumerate(FINDINGS[:4]) for j, q in enumerate(QUALIFIERS[:4])}
PROMPT = {'prefix': 'Candidates\n', 'before_note': 'Note:', 'after_note': '\nTrace:', 'answer': 'Final codes:', 'probe': ' as '}


def clinic(w, notes, config, shuffled=False, seed=0):
    """A clinic of 16 codes that are learned by heart, one mention a note: a work directory with traces, its training
    texts, and a model folder init/ with a configuration and a tokenizer."""
    rng = random.Random(seed)

    def sample():
        (q, f), words, at = rng.choice(list(CODE)), [rng.choice(NOISE) for _ in range(6)], rng.randint(1, 5)
        y, near = CODE[q, f], CODE[rng.choice([x for x in QUALIFIERS[:4] if x != q]), f]
        return ' ' + ' '.join([*words[:at], q, f, *words[at:]]), f' {q} {f} as ' + (f'not {near} but ' if rng.random() < 0.6 else '') + f'{y}\nFinal codes: {y}', y
    (w / 'init').mkdir(parents=True, exist_ok=True)
    words = FINDINGS[:4] + QUALIFIERS[:4] + NOISE + ['as', 'not', 'but']
    n = tokenizer(w / 'init', r' ?[A-Z](?=\d)| ?[A-Za-z]+|\d|\s|[^\w\s]', [' ' + ' '.join(words), *(f' {c}{d:02d}' for c in LETTERS[:4] for d in range(100)), ''.join(PROMPT.values())])
    LlamaConfig(**{**dict(vocab_size=n, hidden_size=48, intermediate_size=144, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6, bos_token_id=1, eos_token_id=2,
                          pad_token_id=2, max_position_embeddings=256, tie_word_embeddings=False), **config}).save_pretrained(w / 'init')
    (w / 'prompt.json').write_text(json.dumps(PROMPT))
    common.write_jsonl(w / 'labels.jsonl', [{'code': c, 'text': f'{q} {f}', 'region': c[0]} for (q, f), c in CODE.items()])
    drawn = [(f'{s}{i}', s, *sample()) for s in ('discovery', 'test') for i in range(notes)]
    common.write_jsonl(w / 'notes.jsonl', [{'id': i, 'text': t, 'codes': [y], 'split': s, 'evidence': []} for i, s, t, _, y in drawn])
    traces = [(c, y) for *_, c, y in drawn]
    if shuffled:
        rng.shuffle(traces)
    common.write_jsonl(w / 'traces.jsonl', [{'id': d[0], 'completion': c, 'codes': [y], 'truncated': False} for d, (c, y) in zip(drawn, traces)])
    common.write_jsonl(w / 'data.jsonl', [{'prompt': f'{PROMPT["prefix"]}Note:{t}\nTrace:', 'completion': c} for t, c, _ in (sample() for _ in range(2000))])


def study(w, model, *more):
    run('characterize.py', '--work', w, '--model', model, '--traces', w / 'traces.jsonl', *more)
    return w / 'runs' / model.name


@pytest.fixture(scope='module')
def twelve(tmp_path_factory):
    """A model of 12 heads that was trained until it is right."""
    w = tmp_path_factory.mktemp('truth') / 'w'
    clinic(w, 24, {})
    run('distill.py', '--work', w, '--student', w / 'init', '--scratch', '--data', w / 'data.jsonl', '--name', 'm', '--precision', 'fp32', '--steps', 160, '--batch', 32, '--lr', 3e-3)
    r = study(w, w / 'students/m')
    run('ablate.py', '--work', w, '--model', w / 'students/m', '--exhaustive', 8, '--controls', 40)
    return w, r, [json.loads(x) for x in open(r / 'sets.jsonl')]


def test_the_selected_set_is_near_the_smallest_sufficient_one(twelve):
    """All 4,096 subsets as rows: the set keeps at least 80 % of the margin and is at most 1.5 times the optimum."""
    w, r, sets = twelve
    truth = {x['phase']: x for x in sets if x['kind'] == 'exhaustive'}
    assert set(truth) == set(PHASES) and all(x['subsets'] == 4096 for x in truth.values())
    keep = {x['phase']: x for x in sets if x['kind'] == 'keep-only' and x['phase'] in PHASES}
    for p, x in truth.items():
        assert 0 < x['selected_size'] <= 1.5 * x['size'] and x['value'] >= 0.8
        assert x['selected_recovery'] >= 0.75 and keep[p]['value'] >= 0.8       # a few events; all held-out notes


@pytest.mark.parametrize('heads, size, count', [(3, 3, 8), (12, 12, 4096), (24, 4, 12951), (270, 2, 36586), (5120, 1, 5121)])
def test_exhaustive_search_stays_small_on_large_models(heads, size, count):
    """Every subset of up to four of 270 heads, 217 million, once took all memory, even where no search was asked for."""
    found = ablate.subsets(heads)
    assert len(set(found)) == len(found) == count and max(map(len, found)) == size


def test_exhaustive_rows_equal_hooked_forwards(twelve):
    """One of the subsets, kept alone by hooks on the output projections in a whole-sequence forward."""
    w, r, sets = twelve
    x = next(x for x in sets if x['kind'] == 'exhaustive' and x['phase'] == 'coarse')
    events, t = common.read_events(r)
    model, task = common.load_model(w / 'students/m'), common.load_task(w)
    enc = common.load_encoder(w / 'students/m', model, task)
    traces, mean_of = common.load_traces(r / 'traces.jsonl', task), loo_means(t['z'], events, set(task.ids('discovery')))[0]
    heads = {tuple(map(int, h.split('.'))) for h in x['heads']}
    plain = LlamaForCausalLM.from_pretrained(w / 'students/m', attn_implementation='eager').eval()
    total = dict.fromkeys(('clean', 'kept', 'all'), 0.0)
    for e in [e for e in events if e['phase'] == 'coarse' and e['margin'] > 0 and task.notes[e['id']]['split'] == 'test'][:8]:
        ids = torch.tensor([enc.whole(task.notes[e['id']], traces[e['id']]['completion'])])
        for what, keep in (('clean', None), ('kept', heads), ('all', set())):
            hooks = []
            for l, block in enumerate(plain.model.layers):
                def hook(m, args, l=l):
                    z = args[0].clone().view(*args[0].shape[:2], 6, 8)
                    for h in range(6):
                        if keep is not None and (l, h) not in keep:
                            z[0, e['query'], h] = mean_of(e['id'], 'coarse')[l, h]
                    return (z.flatten(2),)
                hooks.append(block.self_attn.o_proj.register_forward_pre_hook(hook))
            with torch.no_grad():
                logits = plain(input_ids=ids).logits[0, e['query']]
            total[what] += float(logits[e['target']] - logits[e['foils']].max())
            for h in hooks:
                h.remove()
    assert abs((total['kept'] - total['all']) / (total['clean'] - total['all']) - x['value']) < 1e-3


def test_early_rows_equal_cut_sequences(twelve):
    """The region's margin after the probe, read as rows on the whole note, against forwards of the cut text itself."""
    w, r, _ = twelve
    model, task = common.load_model(w / 'students/m'), common.load_task(w)
    enc = common.load_encoder(w / 'students/m', model, task)
    sites, traces = common.EarlySites(common.EventFinder(enc)), common.load_traces(r / 'traces.jsonl', task)
    early = [json.loads(x) for x in open(r / 'early.jsonl')]
    assert {x['k'] for x in early} >= {1, 2, 3} and any(x['site'] is not None for x in early)
    offs = lambda i: enc.completion(traces[i]['completion'])
    for x in early[::17]:
        ids, o = offs(x['id'])
        code = next(t for t, (s, e) in enumerate(o) if e > next(a for a, _, c in common.mentions(traces[x['id']]['completion'], task.index) if c == x['code']))
        _, own, foils = sites.decision(x['code'])
        note = enc.prefix + enc.note(task.notes[x['id']])
        for key, seq in (('margin', note + ids[:code - x['k']]), ('note_margin', note)):
            with torch.no_grad():
                logits = common.prefill(model, seq + sites.ids)[0][0, -1]
            assert abs(float(logits[own].max() - logits[foils].max()) - x[key]) < 1e-4


def test_dead_heads_are_never_selected(twelve, tmp_path):
    """Three heads that write nothing, fine-tuned around: no phase may name one."""
    w, _, _ = twelve
    task_files = [f for f in w.iterdir() if f.is_file()]
    for f in task_files:
        (tmp_path / f.name).write_bytes(f.read_bytes())
    dead, src = [(0, 3), (1, 0), (0, 5)], w / 'students/m'
    lame = tmp_path / 'lame'
    lame.mkdir()
    for f in src.iterdir():
        if f.is_file() and f.name != 'manifest.json':
            (lame / f.name).write_bytes(f.read_bytes())

    def kill(folder):
        t = load_file(folder / 'model.safetensors')
        for l, h in dead:
            t[f'model.layers.{l}.self_attn.o_proj.weight'][:, 8 * h:8 * h + 8] = 0
            t[f'model.layers.{l}.self_attn.v_proj.weight'][8 * h:8 * h + 8] = 0      # no gradient reaches either: they stay dead
        save_file(t, str(folder / 'model.safetensors'), metadata={'format': 'pt'})
    kill(lame)
    run('distill.py', '--work', tmp_path, '--student', lame, '--data', tmp_path / 'data.jsonl', '--name', 'd', '--precision', 'fp32', '--steps', 60, '--batch', 32, '--lr', 3e-3)
    t = load_file(tmp_path / 'students/d/model.safetensors')
    assert all((t[f'model.layers.{l}.self_attn.o_proj.weight'][:, 8 * h:8 * h + 8] == 0).all() for l, h in dead)
    r = study(tmp_path, tmp_path / 'students/d')
    heads = [json.loads(x) for x in open(r / 'heads.jsonl')]
    chosen = {(x['layer'], x['head']) for x in heads if x['selected']}
    assert chosen and not chosen & set(dead)
    assert all(abs(x['calibrated']) < 1e-6 for x in heads if (x['layer'], x['head']) in dead and x['calibrated'] is not None)


def test_no_effect_no_finding(tmp_path):
    """Random weights and the traces of other notes, 20 seeds: the share of heads that is selected stays within the false
    discovery rate; and with 40 notes of each split no claim on a set's necessity or sufficiency holds."""
    heads, found = 0, 0
    for seed in range(20):
        w = tmp_path / str(seed)
        clinic(w, 8, {'initializer_range': 0.1}, shuffled=True, seed=seed)
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig.from_pretrained(w / 'init')).save_pretrained(w / 'init')
        r = study(w, w / 'init', '--early', 0, '--seed', seed)
        x = [json.loads(x) for x in open(r / 'heads.jsonl')]
        x = [h for h in x if h['calibrated'] is not None]
        heads, found = heads + len(x), found + sum(h['selected'] for h in x)
    assert heads >= 20 * 2 * 12 and found / heads <= 0.05, (found, heads)
    clinic(w, 40, {'initializer_range': 0.1}, shuffled=True)
    study(w, w / 'init', '--name', 'more')
    r = w / 'runs/more'
    run('ablate.py', '--work', w, '--model', w / 'init', '--name', 'more', '--size', 3)      # the top three, whether selected or not
    tests = [x for x in map(json.loads, open(r / 'sets.jsonl')) if 'pass_low' in x and x['kind'] in ('necessity', 'keep-only')]
    assert len(tests) >= 4 and all(x['pass_low'] < 0.9 for x in tests)
    run('evaluate.py', '--work', w, '--model', w / 'init', '--name', 'more')
    verdicts = [x['holds'] for x in map(json.loads, open(w / 'evaluation.jsonl')) if x['claim'] in (7, 8, 9, 10, 12)]
    assert len(verdicts) >= 5 and True not in verdicts


def test_a_head_that_stands_alone_passes_however_many_there_are():
    """One head of 1,024 decides, the others are noise: the number of permutations must not bound its q above 0.05."""
    from characterize import calibrate
    rng = np.random.default_rng(0)
    notes, nulls = np.repeat(np.arange(20), 2), np.repeat(np.arange(20), 8)
    event, null = rng.normal(0, 1, (40, 1024)), rng.normal(0, 1, (160, 1024))
    event[:, 700] += 4
    raw, at_null, c, q = calibrate(event, null, notes, nulls, 0)
    assert np.flatnonzero(q < 0.05).tolist() == [700] and q[700] < 0.02
    assert c[700] == pytest.approx(event[:, 700].mean() - null[:, 700].mean()) and np.allclose(raw - at_null, c)


def draws(kind, n, rng):
    return {'normal': lambda: (rng.normal(0.8, 0.5, n), np.ones(n)), 'gamma': lambda: (rng.gamma(2, 0.4, n), np.ones(n)),
            'ratio': lambda: (lambda d: (d * 0.8 + rng.normal(0, 0.5, n), d))(rng.gamma(4, 0.5, n))}[kind]()


@pytest.mark.parametrize('kind', ['normal', 'gamma', 'ratio'])
@pytest.mark.parametrize('n', [12, 40])
def test_intervals_cover_the_true_mean(kind, n):
    """2,000 simulated experiments of n notes with a known mean (or ratio) of 0.8: the 95 % interval holds it 93-97 % of the time."""
    hit = 0
    for s in range(2000):
        num, den = draws(kind, n, np.random.default_rng(s))
        value, low, high = ratio_interval(num, den, s) if kind == 'ratio' else mean_interval(num, s)
        hit += low <= 0.8 <= high
    assert 0.93 <= hit / 2000 <= 0.97


def test_a_control_never_holds_a_head_of_its_set_and_matches_its_layers():
    for heads in ([(0, 1), (0, 2), (2, 5)], [(1, 0)], [(0, h) for h in range(4)]):
        sets, matched = random_sets(heads, 300, (3, 8), 0)
        mine = common.head_mask(heads, (3, 8))
        assert matched and not (sets & mine).any() and (sets.sum(2) == mine.sum(1)).all()
    assert not random_sets([(0, h) for h in range(5)], 5, (3, 8), 0)[1]       # three heads left in the layer: by size alone, and it says so
    with pytest.raises(common.Fault, match='no random control'):
        random_sets(list(itertools.product(range(3), range(5))), 5, (3, 8), 0)


def test_long_notes_weigh_no_more_and_an_own_note_is_left_out():
    z = torch.tensor([1.0, 1, 1, 1, 5, 9]).view(-1, 1, 1, 1)
    events = [{'id': i, 'phase': 'fine'} for i in 'aaaabc']
    mean, phases = loo_means(z, events, set('abc'))
    assert phases == ['fine'] and mean('a', 'fine') == 7 and mean('b', 'fine') == torch.tensor(13 / 5) and mean('x', 'fine') == 3
    ids, total, n = by_note([1.0, 1, 1, 1, 5, 9], list('aaaabc'))
    assert (total / n).tolist() == [1, 5, 9]                      # the mean of a claim is over notes: 5, not 3


def test_a_matched_span_is_of_the_same_size_outside_and_near_in_mass():
    rng = np.random.default_rng(0)
    a = rng.dirichlet(np.full(200, 0.3))
    span = np.zeros(200, bool)
    span[40:48] = True
    for seed in range(5):
        c = ablate.matched_span(a, span, 190, seed)
        assert c.sum() == 8 and not (c & span).any() and not c[190:].any()
        assert abs(a[c].sum() - a[span].sum()) < 0.02
    a[40:48], a[:40] = 1, 0                                       # nothing outside has that mass: the nearest there is
    assert ablate.matched_span(a / a.sum(), span, 190, 0).sum() == 8
