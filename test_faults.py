"""Bad input: one line naming file and line, a non-zero exit, nothing half-written (KNOWN_FAULTS 29), and a model with nothing to find."""
import json
import pathlib
import subprocess
import sys

import pytest

from common import Fault, load_task, load_traces, read_jsonl

HERE = pathlib.Path(__file__).parent
LABEL = {'code': 'K17', 'text': 'fever acute', 'region': 'K'}
NOTE = {'id': 'n1', 'text': 'came with fever acute', 'codes': ['K17'], 'split': 'test', 'evidence': [{'code': 'K17', 'start': 10, 'end': 21}]}
PROMPT = {'prefix': 'Candidates\nfever acute K17\n', 'before_note': 'Note:', 'after_note': '\nTrace:', 'answer': 'Final codes:'}
line = lambda r: json.dumps(r, ensure_ascii=False).encode() + b'\n'


def work(tmp_path, labels=None, notes=None, prompt=None):
    (tmp_path / 'labels.jsonl').write_bytes(labels if labels is not None else line(LABEL) + line(LABEL | {'code': 'K18'}))
    (tmp_path / 'notes.jsonl').write_bytes(notes if notes is not None else line(NOTE))
    (tmp_path / 'prompt.json').write_text(json.dumps(prompt or PROMPT))
    return tmp_path


BAD = {
    'bad JSON on line 7': (dict(notes=b''.join(line(NOTE | {'id': f'n{i}'}) for i in range(6)) + b'{"id": \n'), 'notes.jsonl:7'),
    'unknown code': (dict(notes=line(NOTE | {'codes': ['K99']})), 'notes.jsonl:1.*K99'),
    'duplicate id': (dict(notes=line(NOTE) + line(NOTE)), 'notes.jsonl:2.*twice'),
    'duplicate code': (dict(labels=line(LABEL) + line(LABEL)), 'labels.jsonl:2.*twice'),
    'empty note': (dict(notes=line(NOTE | {'text': ' \n', 'evidence': []})), 'notes.jsonl:1.*empty'),
    'Latin-1': (dict(notes=line(NOTE) + json.dumps(NOTE | {'id': 'n2', 'text': 'fiévre'}, ensure_ascii=False).encode('latin-1') + b'\n'), 'notes.jsonl:2.*UTF-8'),
    'NUL byte': (dict(notes=line(NOTE | {'text': 'a\0b'})), 'notes.jsonl:1.*NUL'),
    'raw NUL byte': (dict(notes=b'{"id": "\0"}\n'), 'notes.jsonl:1'),
    'offset past the end': (dict(notes=line(NOTE | {'evidence': [{'code': 'K17', 'start': 10, 'end': 99}]})), 'notes.jsonl:1.*99'),
    'no such split': (dict(notes=line(NOTE | {'split': 'validation'})), 'notes.jsonl:1.*validation'),
    'a list in place of an object': (dict(labels=b'[1]\n'), 'labels.jsonl:1.*object'),
    'a missing key': (dict(labels=line({'code': 'K17', 'text': 'x'})), 'labels.jsonl:1.*region'),
    'a number as text': (dict(notes=line(NOTE | {'text': 7})), 'notes.jsonl:1.*text.*str'),
    'no labels': (dict(labels=b''), 'at least one'),
    'a code that is no code': (dict(labels=line(LABEL | {'code': 'K 17'})), 'labels.jsonl:1.*no code'),
    'an incomplete prompt': (dict(prompt={'prefix': ''}), 'prompt.json.*before_note'),
}


@pytest.mark.parametrize('kind', BAD)
def test_bad_task(kind, tmp_path):
    files, message = BAD[kind]
    work(tmp_path, **files)
    with pytest.raises(Fault, match=message) as e:
        load_task(tmp_path)
    assert '\n' not in str(e.value.code)


def test_bad_traces(tmp_path):
    task = load_task(work(tmp_path))
    trace = {'id': 'n1', 'completion': ' K17', 'codes': ['K17'], 'truncated': False}
    for bad, message in ((line(trace) + line(trace), ':2.*two traces'), (line(trace | {'id': 'x'}), ':1.*notes.jsonl'), (line({'id': 'n1'}), ':1.*completion')):
        (tmp_path / 't.jsonl').write_bytes(bad)
        with pytest.raises(Fault, match=message):
            load_traces(tmp_path / 't.jsonl', task)
    with pytest.raises(Fault, match='no such file'):
        read_jsonl(tmp_path / 'absent.jsonl')


def run(*args):
    return subprocess.run([sys.executable, *map(str, args)], cwd=HERE, capture_output=True, text=True)


@pytest.mark.parametrize('stage', ['characterize.py', 'ablate.py', 'knockin.py', 'evaluate.py'])
def test_every_stage_ends_with_one_line_and_writes_nothing(stage, tmp_path):
    work(tmp_path, **BAD['bad JSON on line 7'][0])
    before = sorted(p.name for p in tmp_path.rglob('*'))
    out = run(stage, '--work', tmp_path, '--model', tmp_path / 'no-model')
    assert out.returncode and out.stderr.strip().count('\n') == 0 and 'notes.jsonl:7' in out.stderr, out.stderr
    assert sorted(p.name for p in tmp_path.rglob('*')) == before


def test_no_model_there(tmp_path):
    work(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob('*'))
    out = run('characterize.py', '--work', tmp_path, '--model', tmp_path / 'no-model')
    assert sorted(p.name for p in tmp_path.rglob('*')) == before
    assert out.returncode and out.stderr.strip().splitlines()[-1].startswith('error:') and 'no-model' in out.stderr


def test_a_path_that_is_not_there_is_one_line(tmp_path):
    task, nope = work(tmp_path), tmp_path / 'nope'
    for command in (['characterize.py', '--work', nope, '--model', 'm'], ['characterize.py', '--work', task, '--model', nope], ['ablate.py', '--work', task, '--model', nope],
                    ['distill.py', '--work', task, '--student', nope, '--name', 'a', '--data', nope], ['evaluate.py', '--work', task, '--model', nope],
                    ['data/bc5cdr/prepare.py', '--corpus', nope, '--work', tmp_path / 'new']):
        done = subprocess.run([sys.executable, *map(str, command)], cwd=HERE, capture_output=True, text=True)
        assert done.returncode and len(done.stderr.splitlines()) == 1 and 'nope' in done.stderr, (command, done.stderr)
    assert not (tmp_path / 'new').exists() and not nope.exists()


@pytest.mark.parametrize('command, said', [('distill.py --student s --name n --steps 0', 'at least 1'), ('ablate.py --model m --controls -1', 'at least 0'), ('characterize.py --model m --batch x', "'x'"),
                                           ('data/toy/prepare.py --leaves 11', 'at most 10'), ('data/toy/prepare.py --notes train', 'NAME=NUMBER'), ('data/toy/prepare.py --train loong=3', 'long')])
def test_a_number_out_of_range_is_refused_before_anything_is_written(command, said, tmp_path):
    done = run(*command.split(), '--work', tmp_path / 'new')
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1] and 'Traceback' not in done.stderr, done.stderr
    assert not (tmp_path / 'new').exists()
