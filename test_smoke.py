"""End to end on a tiny toy: every stage runs, hands its files to the next, resumes, and keeps to the file contract."""
import contextlib
import io
import json
import pathlib
import runpy
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
CONTRACT = HERE.parent / 'shared' / 'check_contract.py'


def run(script, *args, ok=True):
    """Runs a script as `python script args` would, in this process (importing torch anew costs seconds)."""
    out, argv, code = io.StringIO(), sys.argv, 0
    sys.argv = [str(script), *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_path(str(HERE / script), run_name='__main__')
    except SystemExit as e:
        code = e.code
        out.write(str(code or ''))
    finally:
        sys.argv = argv
    assert (not code) == ok, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    """A work directory with a teacher trained for a moment, its students, and every stage run on them."""
    w = tmp_path_factory.mktemp('w') / 'toy'
    run('data/toy/prepare.py', '--work', w, '--regions', 3, '--leaves', 3, '--notes', 'train=8,dev=2,discovery=8,test=6', '--train', 'short=640,long=48')
    run('distill.py', '--work', w, '--student', w / 'init/teacher', '--scratch', '--data', w / 'train/short.jsonl', '--name', 'teacher', '--precision', 'fp32', '--steps', 40, '--batch', 16, '--muon', 0.02)
    run('characterize.py', '--work', w, '--model', w / 'students/teacher', '--traces', w / 'gold.jsonl')
    run('ablate.py', '--work', w, '--model', w / 'students/teacher', '--size', 3, '--controls', 20)
    run('knockin.py', '--work', w, '--model', w / 'students/teacher', '--size', 3, '--controls', 20)
    return w


def test_every_record_of_the_toy_can_be_solved_from_its_list(toy):
    """A line's last code is what the list says of its quoted words, the answer repeats them, and no first digit tells a region."""
    import re
    records = [r for f in ('short', 'long') for r in map(json.loads, open(toy / 'train' / f'{f}.jsonl'))]
    for r in records:
        text = r.get('prefix', '') + r['prompt']
        head, note = text.split('\nNote:')
        table = {(q, f): c for q, f, c in re.findall(r' (\w+) (\w+) ([A-Z]\d\d)', head)}
        lines, answer = r['completion'].split('Final codes:')
        lines = [x.split() for x in lines.splitlines()]
        assert len(lines) == sum(w in note.split() for w in 'first second third fourth fifth sixth'.split())
        for x in lines:
            q, f = x[2:4] if x[1] == 'possible' else x[1:3]
            assert f'{q} {f}' in note and x[-1] == table[q, f] and ('not' in x) == (x[1] == 'possible')
        assert re.findall(r'[A-Z]\d\d', answer) == [x[-1] for x in lines]
        regions = {}
        for c in table.values():
            regions.setdefault(c[0], []).append(c[1])
        assert len({tuple(sorted(d)) for d in regions.values()}) == 1 and all(len(set(d)) == len(d) for d in regions.values())
    assert len({r['prefix'] for r in records if 'prefix' in r}) == 48 / 8


def test_files_of_every_stage(toy):
    run_ = toy / 'runs' / 'teacher'
    t, events = load_file(run_ / 'events.safetensors'), [json.loads(x) for x in open(run_ / 'events.jsonl')]
    E, L, H, D = t['z'].shape
    assert E == len(events) and (L, H) == (3, 8) and t['mean'].shape == (3, L, H, D) and t['attribution'].shape == (E, L, H)
    assert [e['event'] for e in events] == list(range(E)) and {e['phase'] for e in events} == {'coarse', 'fine', 'contrast'}
    a = load_file(run_ / 'ablation.safetensors')
    assert a['effect'].shape == (E, L, H) and a['drift'].shape == (E,) and np.nanmax(a['drift']) < 1e-4
    codes = {(r['id'], c) for r in map(json.loads, open(run_ / 'traces.jsonl')) for c in r['codes'] if r['id'].startswith(('disc', 'test'))}
    found = {(r['id'], r['code']) for f in ('events', 'dropped') for r in map(json.loads, open(run_ / f'{f}.jsonl'))}
    assert codes <= found                                       # every code of every trace is an event or a dropped record
    for f in ('sets', 'knockin'):
        assert (run_ / f'{f}.jsonl').stat().st_size
    assert stat.S_IMODE(toy.stat().st_mode) == 0o700 and stat.S_IMODE(run_.stat().st_mode) == 0o700
    assert not list(toy.rglob('.*.jsonl.*')) and not list(toy.rglob('*.pt')) and not list(toy.rglob('*.bin'))


def test_attribution_and_sweep_agree_in_sign(toy):
    """First order against exact on a trained model: the two rank heads alike."""
    from scipy.stats import spearmanr
    a, b = load_file(toy / 'runs/teacher/events.safetensors')['attribution'], load_file(toy / 'runs/teacher/ablation.safetensors')['effect']
    assert spearmanr(a.mean(0).ravel(), b.mean(0).ravel()).statistic > 0.5


def test_keep_only_and_controls(toy):
    sets = [json.loads(x) for x in open(toy / 'runs/teacher/sets.jsonl')]
    plain = [r for r in sets if r['kind'] in ('necessity', 'keep-only') and r['phase'] != 'early']
    keep = {r['phase']: r['value'] for r in plain if r['kind'] == 'keep-only'}
    curve = {r['phase']: r['value'] for r in sets if r['kind'] == 'curve' and r['size'] == 3}
    assert keep and all(curve[p] == pytest.approx(v, abs=1e-5) for p, v in keep.items() if v is not None)     # one set, two kinds of test
    assert {r['kind'] for r in sets} >= {f'{k} ({v})' for k in ('necessity', 'keep-only') for v in ('zero', 'resample', 'lse')}
    for r in plain:
        assert r['n'] > 0 and r['size'] == 3
        assert r['measurable'] == (abs(r['drop']) > r['drift'])   # fault 10
        assert r['value'] is None or r['low'] <= r['value'] <= r['high']
        if r['set'] == r['phase']:
            assert len(r['controls']) in (0, 20) and r['layers_matched'] in (True, False)


def test_mean_leaves_the_own_note_out(toy):
    from safetensors.torch import load_file as torch_file
    from common import loo_means
    import torch
    z = torch_file(toy / 'runs/teacher/events.safetensors')['z']
    events = [json.loads(x) for x in open(toy / 'runs/teacher/events.jsonl')]
    discovery = {e['id'] for e in events if e['id'].startswith('discovery')}
    mean, phases = loo_means(z, events, discovery)
    one = next(e['id'] for e in events if e['phase'] == 'coarse' and e['id'] in discovery)
    brute = z[[i for i, e in enumerate(events) if e['phase'] == 'coarse' and e['id'] in discovery and e['id'] != one]].mean(0)
    assert torch.allclose(mean(one, 'coarse'), brute, atol=1e-5) and set(phases) == {'coarse', 'fine', 'contrast'}
    from common import Fault
    with pytest.raises(Fault, match='at least 2 other'):
        loo_means(z, events, {one})[0](one, 'coarse')


def test_a_second_run_finds_everything_done_and_other_settings_are_refused(toy):
    model = toy / 'students/teacher'
    before = {p: p.read_bytes() for p in (toy / 'runs/teacher').glob('*.*')}
    for stage, more in (('characterize.py', ['--traces', toy / 'gold.jsonl']), ('ablate.py', ['--size', 3, '--controls', 20]), ('knockin.py', ['--size', 3, '--controls', 20])):
        assert 'already' in run(stage, '--work', toy, '--model', model, *more)
    assert 'margin' in run('characterize.py', '--work', toy, '--model', model, '--traces', toy / 'gold.jsonl', '--margin', 'lse', ok=False)
    assert 'size' in run('ablate.py', '--work', toy, '--model', model, '--size', 2, ok=False)
    assert before == {p: p.read_bytes() for p in (toy / 'runs/teacher').glob('*.*')}


def test_a_killed_stage_goes_on_to_the_same_bytes(toy, tmp_path):
    other = tmp_path / 'toy'
    shutil.copytree(toy, other)
    run_ = other / 'runs' / 'teacher'
    want = {f: (run_ / f).read_bytes() for f in ('events.safetensors', 'events.jsonl', 'heads.jsonl', 'ablation.safetensors', 'sets.jsonl')}
    for f in want:
        (run_ / f).unlink()
    manifest = json.loads((run_ / 'manifest.json').read_text())
    for stage in ('characterize', 'ablate'):
        manifest[stage]['done'] = False
        for part in list((run_ / 'parts').glob('*/*'))[::2]:    # half of the notes had been reached
            part.unlink(missing_ok=True)
    manifest.pop('ablate')                                      # its settings hash files that are not there yet
    (run_ / 'manifest.json').write_text(json.dumps(manifest))
    run('characterize.py', '--work', other, '--model', toy / 'students/teacher', '--traces', toy / 'gold.jsonl')
    run('ablate.py', '--work', other, '--model', toy / 'students/teacher', '--size', 3, '--controls', 20)
    assert want == {f: (run_ / f).read_bytes() for f in want}


def test_two_ranks_give_what_one_gives(toy, tmp_path):
    other = tmp_path / 'toy'
    shutil.copytree(toy, other)
    run_ = other / 'runs' / 'teacher'
    want = (run_ / 'knockin.jsonl').read_bytes()
    (run_ / 'knockin.jsonl').unlink()
    shutil.rmtree(run_ / 'parts' / 'knockin')
    manifest = json.loads((run_ / 'manifest.json').read_text())
    manifest['knockin']['done'] = False
    (run_ / 'manifest.json').write_text(json.dumps(manifest))
    subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', 'knockin.py', '--work', str(other),
                    '--model', str(toy / 'students/teacher'), '--size', '3', '--controls', '20'], cwd=HERE, check=True, capture_output=True)
    assert (run_ / 'knockin.jsonl').read_bytes() == want


def test_distil_both_arms_and_evaluate(toy):
    run_ = toy / 'runs' / 'teacher'
    heads = [json.loads(x) for x in open(run_ / 'heads.jsonl')]
    if not any(h['selected'] for h in heads):                   # the tiny teacher need not have a significant head: mark some by hand
        for h in heads:
            h['selected'] = h['rank'] <= 2
        (run_ / 'heads.jsonl').write_text(''.join(json.dumps(h) + '\n' for h in heads))
    for lam, name in ((0, 'cot'), (0.3, 'mistill')):
        out = run('distill.py', '--work', toy, '--teacher', toy / 'students/teacher', '--student', toy / 'init/student', '--scratch', '--lam', lam, '--name', name,
                  '--precision', 'fp32', '--steps', 4, '--batch', 4)
        log = [json.loads(x) for x in open(toy / 'students' / name / 'log.jsonl')]
        assert len(log) == 4 and (log[0]['kl'] > 0) == (lam > 0)
        run('characterize.py', '--work', toy, '--model', toy / 'students' / name, '--traces', toy / 'gold.jsonl')
        run('ablate.py', '--work', toy, '--model', toy / 'students' / name, '--size', 2, '--controls', 5)
        run('knockin.py', '--work', toy, '--model', toy / 'students' / name, '--size', 2, '--controls', 5)
    assert 'not mapped' in out
    first = [json.loads(open(toy / 'students' / n / 'log.jsonl').readline()) for n in ('cot', 'mistill')]
    assert first[0]['ce'] == first[1]['ce']                     # same data, order and weights in both arms
    run('evaluate.py', '--work', toy, '--model', toy / 'students/teacher')
    rows = [json.loads(x) for x in open(toy / 'evaluation.jsonl')]
    assert {r['claim'] for r in rows} == set(range(1, 21))
    assert all(r['reason'] for r in rows if r['value'] is None) and all(r['command'] for r in rows)
    assert not any('reason' in r for r in rows if r['value'] is not None and r['claim'] < 14)
    assert all(r['low'] - 1e-9 <= r['value'] <= r['high'] + 1e-9 for r in rows if r['low'] is not None)      # no value beside its own interval
    report = (toy / 'report.md').read_text()
    assert 'not computed' in report and all((toy / 'figures' / f).stat().st_size > 5000 for f in ('heads-teacher.png', 'students.png'))
    note = json.loads(open(toy / 'notes.jsonl').readline())['text'].strip()
    assert note not in report and note not in out               # no note text in reports or logs
    if CONTRACT.exists():
        assert 'contract holds' in run(CONTRACT, toy)


def test_a_model_with_nothing_to_find(tmp_path):
    """Random weights, six notes: a valid input. Its own traces are cut at the limit, so there are no events at all."""
    w = tmp_path / 'toy'
    run('data/toy/prepare.py', '--work', w, '--regions', 3, '--leaves', 3, '--notes', 'discovery=3,test=3', '--train', 'short=1')
    from transformers import AutoConfig, AutoModelForCausalLM
    import torch
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(w / 'init/teacher')).save_pretrained(tmp_path / 'random')
    for f in (w / 'init/teacher').glob('tokenizer*'):
        shutil.copy(f, tmp_path / 'random')
    for name, more in (('own', ['--max-new-tokens', 8]), ('given', ['--traces', w / 'gold.jsonl'])):
        args = ['--work', w, '--model', tmp_path / 'random', '--name', name]
        out = run('characterize.py', *args, *more)
        assert 'nothing was selected' in out or name == 'given'
        for stage in ('ablate.py', 'knockin.py', 'evaluate.py'):
            run(stage, *args)
        assert [json.loads(x)['claim'] for x in open(w / 'evaluation.jsonl')] and (w / 'report.md').exists()
        assert len(open(w / 'runs' / name / 'heads.jsonl').readlines()) == 3 * 24
    if CONTRACT.exists():
        assert 'contract holds' in run(CONTRACT, w)


def test_run_all_stops_at_a_failing_lane_and_knows_a_finished_run(tmp_path):
    """The driver alone, with a stand-in for python that notes its calls and fails where it is told to."""
    fake, w = tmp_path / 'fake', tmp_path / 'w'
    fake.write_text('#!/bin/bash\necho "$@" >> "$CALLS"\ncase "$*" in *${FAIL:-nothing}*) echo broken >&2; exit 3;; esac\n'
                    'n=$*; n=${n##*--name }; n=${n%% *}; case "$1" in data*) mkdir -p "$3";; distill.py) d=$3/students/$n;; characterize.py) d=$3/runs/${5##*/};; evaluate.py) touch "$3/report.md";; esac\nif [ "$d" ]; then mkdir -p "$d"; echo \'"done": true\' > "$d/manifest.json"; fi\n')
    fake.chmod(0o755)

    def go(**env):
        import os
        return subprocess.run(['bash', 'run_all.sh'], cwd=HERE, capture_output=True, text=True, env={**os.environ, 'PY': str(fake), 'WORK': str(w), 'CALLS': str(tmp_path / 'calls'), **env})
    calls = lambda: (tmp_path / 'calls').read_text().splitlines()
    broken = go(FAIL='init/second')
    assert broken.returncode and not (w / '.finished').exists() and not any(c.startswith('evaluate') for c in calls())
    stuck = go(FAIL='init/student', WORK=str(tmp_path / 'stuck'))    # what the other lane waits for is never made
    assert stuck.returncode and not (tmp_path / 'stuck' / '.finished').exists() and not any(c.startswith('evaluate') for c in calls())
    (tmp_path / 'calls').unlink()
    done = go(SEEDS='2')
    assert not done.returncode, done.stderr
    names = [c.split('--name ')[1].split()[0] for c in calls() if c.startswith('distill.py')]
    assert len(names) == len(set(names)) and set(names) == {f'{r}{x}' for r in ('teacher', 'second') for x in ('-copy-near', '-copy', '-short', '')} | {
        f'base-s{s}{x}' for s in (0, 1) for x in ('-near', '')} | {f'{a}-fp32-s{s}' for s in (0, 1) for a in ('top-0', 'top-0.3', 'random-0.3')}
    assert calls()[-1].startswith('evaluate') and sum(c.startswith('characterize') for c in calls()) == 8
    before = calls()
    again = go(SEEDS='2')
    assert 'everything is done' in again.stdout and calls() == before
    go(SEEDS='1')                                                 # other settings: the stages are asked again
    assert len(calls()) > len(before)
