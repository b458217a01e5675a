"""common.py - the engine under every stage: files, tokens, events, the probe, rows, statistics.

A *row* is one counterfactual: the token at a decision position q once more, with position id q, seeing keys [0, q) and
itself, carrying its own edit. One small forward over R rows runs R counterfactuals on the KV of a note that was read once.

Short names: B batch, T tokens, P shared past tokens, R rows, E events, L layers, H query heads, K KV heads, G = H / K,
D head dim, C hidden size, V vocabulary, U token ids scored. Shapes stand in the margin.
"""
import argparse
import atexit
import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tqdm import tqdm

PHASES = ('coarse', 'fine', 'contrast')
SPLITS = ('train', 'dev', 'discovery', 'test')
CODE = re.compile(r'\w+(?:\.\w+)*')     # what a code may look like; E11.9, D003490, 12.7
QUERY_BLOCK = 1024                      # queries (times G) of one block of the clean pass: memory linear in T
SCORE_BUDGET = 2 ** 20                  # attention scores held at once by rows on a CPU (4 MB: they stay in its cache); 64 x on a GPU

# ------------------------------------------------------------------------------------------------ files

class Fault(SystemExit):
    """Bad input or a folder that does not fit: one line on stderr, exit code 1."""
    def __init__(self, message):
        super().__init__('error: ' + ' '.join(str(message).split()))


def private_dir(path):
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    os.chmod(path, 0o700)
    return path


@contextlib.contextmanager
def whole(path):
    """Yields a temporary path that becomes `path` only if the block succeeds: no half-written file."""
    path = pathlib.Path(path)
    tmp = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        yield tmp
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path, text):
    with whole(path) as tmp:
        tmp.write_text(text, encoding='utf-8')


def write_jsonl(path, records):
    write_text(path, ''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in records))


def write_tensors(path, tensors):
    with whole(path) as tmp:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(tmp))


def read_jsonl(path, fields=()):
    """Records of a JSONL file; raises Fault naming file and line. fields: {'key': type} or a tuple of keys."""
    path = pathlib.Path(path)
    if not path.exists():
        raise Fault(f'{path}: no such file')
    records = []
    for i, raw in enumerate(path.read_bytes().split(b'\n'), 1):
        at = f'{path}:{i}'
        if not raw.strip():
            continue
        try:
            line = raw.decode('utf-8')
        except UnicodeDecodeError as e:
            raise Fault(f'{at}: not UTF-8 (byte {e.start}); convert the file first')
        try:
            r = json.loads(line)
        except ValueError as e:
            raise Fault(f'{at}: not JSON: {e}')
        if not isinstance(r, dict):
            raise Fault(f'{at}: expected an object, found {type(r).__name__}')
        for key in fields:
            if key not in r:
                raise Fault(f'{at}: lacks "{key}"')
            if isinstance(fields, dict) and not isinstance(r[key], fields[key]):
                raise Fault(f'{at}: "{key}" should be {fields[key].__name__}, found {type(r[key]).__name__}')
        if '\\u0000' in line:
            raise Fault(f'{at}: a NUL character in the text')
        records.append((i, r))
    return records


def sha(*parts):
    h = hashlib.sha256()
    for p in parts:
        h.update(p if isinstance(p, bytes) else str(p).encode())
        h.update(b'\0')
    return h.hexdigest()[:16]


def folder_hash(path):
    """Hash of a model folder or file: names, sizes and both ends (1 MB) of every weight and config file."""
    path = pathlib.Path(path)
    if not path.exists():
        return f'hub:{path}'
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in ('.json', '.safetensors', '.gguf', '.model', '.txt', '.jinja'))
    parts = []
    for p in files:
        with p.open('rb') as f:
            head = f.read(2 ** 20)
            f.seek(max(0, p.stat().st_size - 2 ** 20))
            parts += [p.name, p.stat().st_size, head, f.read()]
    return sha(*parts)


def begin(folder, stage, settings):
    """Opens a stage in `folder`: True where it was finished with the same settings, Fault where they differ.
    manifest.json holds one entry a stage: settings (compared), versions and commit (recorded), done."""
    path = pathlib.Path(folder) / 'manifest.json'
    manifest = json.loads(path.read_text()) if path.exists() else {}
    settings = json.loads(json.dumps(settings, default=str))
    old = manifest.get(stage)
    if old:
        differ = [f'{k}: {old["settings"].get(k)!r} there, {settings.get(k)!r} now'
                  for k in sorted(old['settings'] | settings) if old['settings'].get(k) != settings.get(k)]
        if differ:
            raise Fault(f'{folder} was made by {stage} with other settings ({"; ".join(differ)}); take another --name or move the folder away')
        return old['done']
    if rank() == 0:
        import transformers
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
        manifest[stage] = {'settings': settings, 'done': False, 'commit': git.stdout.strip() or None,
                           'versions': {'python': sys.version.split()[0], 'torch': torch.__version__, 'transformers': transformers.__version__, 'numpy': np.__version__}}
        write_text(path, json.dumps(manifest, indent=1) + '\n')
    return False


def finish(folder, stage):
    path = pathlib.Path(folder) / 'manifest.json'
    manifest = json.loads(path.read_text())
    manifest[stage]['done'] = True
    write_text(path, json.dumps(manifest, indent=1) + '\n')


def rank():
    return int(os.environ.get('RANK', 0))


def world():
    return int(os.environ.get('WORLD_SIZE', 1))


def barrier():
    """Waits for the other ranks of torchrun (a no-op in one process)."""
    if world() > 1:
        import torch.distributed as dist
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
            dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
            atexit.register(dist.destroy_process_group)      # or gloo's threads outlive the interpreter, and now and then abort it
        dist.barrier()


def each_note(folder, what, ids, compute):
    """{id: tensors} for every id, one file a note under folder/parts/what: a killed run goes on where it stopped.
    compute(id) -> dict of tensors. Under torchrun each rank computes every world-th note and reads the others'."""
    parts = private_dir(pathlib.Path(folder) / 'parts' / what)
    name = {i: parts / f'{sha(i)}.safetensors' for i in ids}
    todo = [i for i in list(ids)[rank()::world()] if not name[i].exists()]
    for i in tqdm(todo, desc=what, unit='note', disable=None, leave=False):
        write_tensors(name[i], compute(i))
    barrier()
    return {i: load_file(name[i]) for i in ids}

# ------------------------------------------------------------------------------------------------ the task

@dataclass
class Task:
    """A work directory's labels, notes and prompt, checked. codes: list of codes in the order of labels.jsonl."""
    work: pathlib.Path
    labels: list
    notes: dict
    prompt: dict
    hash: str
    codes: list = field(init=False)
    index: dict = field(init=False)
    region: np.ndarray = field(init=False)     # (codes,) region number
    chapter: dict = field(init=False)

    def __post_init__(self):
        self.codes = [r['code'] for r in self.labels]
        self.index = {c: i for i, c in enumerate(self.codes)}
        self.region = np.unique([r['region'] for r in self.labels], return_inverse=True)[1]
        self.chapter = {r['code']: r.get('chapter') for r in self.labels}

    def ids(self, *splits):
        return [i for i, n in self.notes.items() if n['split'] in splits]


def load_task(work):
    """Reads labels.jsonl, notes.jsonl, prompt.json of a work directory. Raises Fault naming file, line and id."""
    work = pathlib.Path(work)
    labels, seen = [], set()
    for i, r in read_jsonl(work / 'labels.jsonl', {'code': str, 'text': str, 'region': str}):
        at = f'{work}/labels.jsonl:{i}'
        if r['code'] in seen:
            raise Fault(f'{at}: code {r["code"]} stands twice')
        if not CODE.fullmatch(r['code']):
            raise Fault(f'{at}: {r["code"]!r} is no code (letters, digits, inner dots); give the label a code cluster.item')
        seen.add(r['code'])
        labels.append(r)
    if not labels:
        raise Fault(f'{work}/labels.jsonl: at least one label is needed')
    notes = {}
    for i, r in read_jsonl(work / 'notes.jsonl', {'id': str, 'text': str, 'codes': list, 'split': str, 'evidence': list}):
        at = f'{work}/notes.jsonl:{i}: note {r["id"]}'
        if r['id'] in notes:
            raise Fault(f'{at}: id stands twice')
        if not r['text'].strip():
            raise Fault(f'{at}: empty text')
        if r['split'] not in SPLITS:
            raise Fault(f'{at}: split {r["split"]!r} is none of {", ".join(SPLITS)}')
        for c in r['codes']:
            if c not in seen:
                raise Fault(f'{at}: code {c!r} is not in labels.jsonl')
        for e in r['evidence']:
            if not (isinstance(e, dict) and {'code', 'start', 'end'} <= e.keys()):
                raise Fault(f'{at}: evidence needs code, start, end')
            if not 0 <= e['start'] < e['end'] <= len(r['text']):
                raise Fault(f'{at}: evidence {e["start"]}-{e["end"]} outside its text of {len(r["text"])} characters')
        notes[r['id']] = r
    if not notes:
        raise Fault(f'{work}/notes.jsonl: at least one note is needed')
    path = work / 'prompt.json'
    try:
        prompt = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as e:
        raise Fault(f'{path}: {e}')
    for k in ('prefix', 'before_note', 'after_note', 'answer'):
        if not isinstance(prompt.get(k), str):
            raise Fault(f'{path}: lacks the string "{k}"')
    if not prompt['answer']:
        raise Fault(f'{path}: "answer" is empty; it opens the final answer in a completion')
    digest = sha(*[(work / f).read_bytes() for f in ('labels.jsonl', 'notes.jsonl', 'prompt.json')])
    return Task(work, labels, notes, prompt, digest)


def load_traces(path, task):
    """{id: trace} of a traces.jsonl made by any engine. Raises Fault naming file and line."""
    traces = {}
    for i, r in read_jsonl(path, {'id': str, 'completion': str, 'codes': list, 'truncated': bool}):
        if r['id'] not in task.notes:
            raise Fault(f'{path}:{i}: note {r["id"]!r} is not in notes.jsonl')
        if r['id'] in traces:
            raise Fault(f'{path}:{i}: note {r["id"]} has two traces')
        traces[r['id']] = r
    return traces

# ------------------------------------------------------------------------------------------------ models and tokens

def at_least(least, most=math.inf):
    """An argparse type: whole numbers from least to most."""
    def number(x):
        if not least <= int(x) <= most:
            raise argparse.ArgumentTypeError(f'{x}: expected a whole number of at least {least}' + (f' and at most {most}' if most < math.inf else ''))
        return int(x)
    return number


def common_args(doc, model=True):
    """An ArgumentParser with the options that every stage shares."""
    p = argparse.ArgumentParser(description=doc.split('\n\n')[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--work', required=True, help='work directory of the task (labels.jsonl, notes.jsonl, prompt.json)')
    if model:
        p.add_argument('--model', required=True, help='model folder, hub id or .gguf file')
        p.add_argument('--name', help='folder under WORK/runs; default: last part of --model')
    p.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16', 'float16'), help='of the weights')
    p.add_argument('--device', default=f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if torch.cuda.is_available() else 'cpu', help='torch device')
    p.add_argument('--device-map', help='"auto" spreads a model over several cards (needs accelerate)')
    p.add_argument('--rows', type=at_least(0), default=0, help='counterfactual rows of one forward; 0: from free memory')
    p.add_argument('--chat', action='store_true', help="render the tokenizer's chat template around the prompt")
    p.add_argument('--margin', default='max', choices=('max', 'lse'), help='how foils are pooled in a margin')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--show-text', action='store_true', help='allow note text on the screen (notes may be credentialed)')
    return p


def run_dir(args):
    """WORK/runs/NAME of a stage's arguments, made private; Fault where --model is a path and nothing is there."""
    model = pathlib.Path(args.model)
    if not model.exists() and (args.model.endswith('.gguf') or args.model[0] in './~' or args.model.count('/') > 1):
        raise Fault(f'{model}: no such model folder or file')
    private_dir(args.work)
    private_dir(pathlib.Path(args.work) / 'runs')
    return private_dir(pathlib.Path(args.work) / 'runs' / (args.name or model.name.removesuffix('.gguf')))


def load_tokenizer(path):
    """The fast tokenizer of a model folder, hub id or .gguf file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    kw = {'gguf_file': os.path.basename(path)} if str(path).endswith('.gguf') else {}
    config = pathlib.Path(path) / 'tokenizer_config.json'
    generic = config.exists() and json.loads(config.read_text()).get('tokenizer_class') in ('TokenizersBackend', 'PreTrainedTokenizerFast')
    # AutoTokenizer rebuilds a Qwen2 folder's tokenizer as Qwen2's own, whatever its tokenizer.json says
    tok = (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(os.path.dirname(path) or '.' if kw else path, **kw)
    if not tok.is_fast:
        raise Fault(f'{path}: {type(tok).__name__} is no fast tokenizer, so characters cannot be traced to tokens')
    return tok


def load_model(path, dtype='float32', device='cpu', device_map=None, scratch=None):
    """A causal LM whose attention runs through the probe, in eval mode. scratch: a seed, for random weights from the
    folder's config.json. Raises Fault for a model whose attention class does not go through AttentionInterface."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    register()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        if scratch is not None:
            torch.manual_seed(scratch)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
        elif str(path).endswith('.gguf'):
            model = AutoModelForCausalLM.from_pretrained(os.path.dirname(path) or '.', gguf_file=os.path.basename(path), dtype=dtype)
            model.hf_quantizer = None            # dequantised on load: save_pretrained must not look for a quantiser
            if hasattr(model.config, 'quantization_config'):
                del model.config.quantization_config
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map)
    except OSError as e:
        raise Fault(f'{path}: no model there ({str(e).splitlines()[0]})')
    if not device_map:
        model.to(device)
    return attach(model.eval().requires_grad_(False))


def attach(model):
    """Puts the probe under `model` and reads off its shape with a two-token forward: model.probe_shape = (L, H, D),
    model.probe_layers = decoder layers in order. Raises Fault naming the attention class where the seam is missing."""
    register()
    kinds = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith(('Attention', 'Mixer'))}) or [type(model).__name__]
    unsupported = Fault(f'{type(model).__name__}: its attention class {", ".join(kinds)} does not run through transformers.AttentionInterface, so the probe cannot see its heads')
    try:
        model.set_attn_implementation('probe')
        with torch.no_grad(), Probe(model) as probe:
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    except (ValueError, NotImplementedError, AttributeError, TypeError):
        raise unsupported
    layers = [name for name, m in model.named_modules() if m in probe.modules]
    if not probe.modules or sorted(m.layer_idx for m in probe.modules) != list(range(len(layers))):
        raise unsupported
    if len({s for s in probe.shapes}) != 1:
        raise Fault(f'{type(model).__name__}: {kinds[0]} has layers of different head counts {sorted(set(probe.shapes))}')
    named = dict(model.named_modules())
    blocks = {m.layer_idx: named[re.match(r'.*?\.\d+(?=\.|$)', name)[0]] for name, m in named.items() if m in probe.modules}
    model.probe_layers = [blocks[i] for i in range(len(layers))]
    model.probe_shape = (len(layers), *probe.shapes[0])
    return model


def spans(tok, texts):
    """[(ids, [(start, end)])] of each text, without special tokens; every character that is no white space belongs to
    a token. Offsets a tokenizer gets wrong (zero width, gaps) are replaced by decoding growing prefixes; a text that
    decoding does not give back is a Fault, never a guess."""
    if not texts:
        return []
    out = tok(texts, add_special_tokens=False, return_offsets_mapping=True)
    result = []
    for text, ids, offs in zip(texts, out['input_ids'], out['offset_mapping']):
        covered = np.zeros(len(text) + 1, bool)
        ok, last = True, 0
        for s, e in offs:
            ok &= s < e and s >= last and e <= len(text)
            last = s
            covered[s:e] = True
        ok = ok and all(covered[i] or text[i].isspace() for i in range(len(text)))
        if not ok:
            offs, done = [], 0
            for i in range(len(ids)):
                piece = tok.decode(ids[:i + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
                end = len(piece.rstrip('\ufffd')) if i + 1 < len(ids) else len(piece)
                if not text.startswith(piece[:end].rstrip('\ufffd')):
                    raise Fault('a tokenizer whose offsets are wrong and whose decoding does not give its text back; use another tokenizer.json')
                offs.append((min(done, end), max(end, done)))
                done = max(end, done)
            if done != len(text):
                raise Fault('a tokenizer whose offsets are wrong and whose decoding loses text; use another tokenizer.json')
        result.append((list(ids), [tuple(o) for o in offs]))
    return result


@dataclass
class Encoder:
    """Text to token ids by the contract: ids(prefix) + ids(before + note + after) + ids(completion), each part by itself,
    special tokens once at the front. eos: ids that end a completion."""
    tok: object
    task: Task
    chat: bool = False
    stop: tuple = ()

    def __post_init__(self):
        p, head, tail = self.task.prompt, '', ''
        if self.chat:
            if not self.tok.chat_template:
                raise Fault('--chat: this tokenizer has no chat template')
            mark = 'XXNOTEXX'
            head, tail = self.tok.apply_chat_template([{'role': 'user', 'content': mark}], tokenize=False, add_generation_prompt=True).split(mark)
        self.before, self.after = p['before_note'], p['after_note'] + tail
        self.prefix_text = head + p['prefix']
        bare = self.tok('a', add_special_tokens=False)['input_ids']
        full = self.tok('a')['input_ids']
        front = full[:len(full) - len(bare)] if bare and full[-len(bare):] == bare else full[:1] if full[:1] == [self.tok.bos_token_id] else []
        ids = self.tok(self.prefix_text, add_special_tokens=False)['input_ids']
        self.front = 0 if ids[:len(front)] == front else len(front)      # a template that has its BOS gets no second one
        self.prefix = front[:self.front] + ids
        self.eos = tuple(dict.fromkeys([*self.stop, *([self.tok.eos_token_id] if self.tok.eos_token_id is not None else [])]))

    def prompt_text(self, note):
        return self.before + note['text'] + self.after

    def note(self, note):
        return self.tok(self.prompt_text(note), add_special_tokens=False)['input_ids']

    def completion(self, text):
        return spans(self.tok, [text])[0]

    def whole(self, note, completion):
        """The ids of prefix, note and completion, one sequence."""
        return self.prefix + self.note(note) + self.completion(completion)[0]

    def hash(self):
        return sha(self.tok.backend_tokenizer.to_str(), self.chat)

def load_encoder(path, model, task, chat=False):
    """The Encoder of a model: its tokenizer, and every id that ends its completions."""
    stop = getattr(model.generation_config, 'eos_token_id', None)
    return Encoder(load_tokenizer(path), task, chat, tuple([stop] if isinstance(stop, int) else stop or ()))

# ------------------------------------------------------------------------------------------------ trie and events

class Trie:
    """Candidate codes as token sequences in one context, sorted: a node is a range of rows. seqs: lists of ids, in the
    order of task.codes; region: (n,) region number. Building is O(n log n), a query O(depth * node)."""

    def __init__(self, seqs, region):
        depth = max(map(len, seqs))
        m = np.full((len(seqs), depth), -1, np.int64)
        for i, s in enumerate(seqs):
            m[i, :len(s)] = s
        self.order = np.lexsort(m.T[::-1])
        self.m, self.region, self.row = m[self.order], np.asarray(region)[self.order], np.argsort(self.order)
        self.seqs = seqs

    def path(self, i):
        """For each token of candidate i: (tokens, regions) that the candidates still possible have there."""
        lo, hi = 0, len(self.m)
        for d, t in enumerate(self.seqs[i]):
            col = self.m[lo:hi, d]
            here = col >= 0                                       # a shorter code has ended: it offers no token
            yield col[here], self.region[lo:hi][here]
            lo, hi = lo + np.searchsorted(col, t), lo + np.searchsorted(col, t, 'right')

    def decisions(self, i, coarse='first'):
        """[(phase, depth, foils, merged)] of candidate i: METHOD's coarse and fine events."""
        r, steps = self.region[self.row[i]], list(self.path(i))
        found = []
        for d, (tokens, region) in enumerate(steps):
            out = np.setdiff1d(tokens, tokens[region == r])
            if len(out) and (coarse == 'settling' or not found):
                rest = steps[d + 1][0] if d + 1 < len(steps) else [0]
                found.append(('coarse', d, out.tolist(), len(rest) <= 1))
        found = found[-1:]
        first = found[0][1] + 1 if found else 0
        for d in range(first, len(steps)):
            tokens, region = steps[d]
            stay = np.setdiff1d(tokens[region == r], [self.seqs[i][d]])
            if len(stay):
                found.append(('fine', d, stay.tolist(), False))
        return found


def mentions(text, index):
    """[(start, end, code)] of every candidate code in text, whole codes only (E11 inside E11.9 is none)."""
    found = []
    for m in CODE.finditer(text):
        run = m[0]
        while run not in index and '.' in run:
            run = run.rsplit('.', 1)[0]
        if run in index:
            found.append((m.start(), m.start() + len(run), run))
    return found


def answer_codes(completion, task):
    """The codes of the final answer (in order, once each), or [] where the answer was never opened."""
    at = completion.rfind(task.prompt['answer'])
    return list(dict.fromkeys(c for _, _, c in mentions(completion[at + len(task.prompt['answer']):], task.index))) if at >= 0 else []


class EventFinder:
    """Finds the decisions of a trace. Tries are cached by the characters around the code."""

    def __init__(self, enc, coarse='first'):
        self.enc, self.task, self.coarse, self.tries = enc, enc.task, coarse, {}

    def trie(self, left, right):
        if (left, right) not in self.tries:
            seqs = []
            for code, (ids, offs) in zip(self.task.codes, spans(self.enc.tok, [left + c + right for c in self.task.codes])):
                a, b = len(left), len(left) + len(code)
                seqs.append([i for i, (s, e) in zip(ids, offs) if s < b and e > a])
            self.tries[left, right] = Trie(seqs, self.task.region)
        return self.tries[left, right]

    def locate(self, text, ids, offs, a, b, code):
        """(index of the code's first token, Trie) in the context of text[a:b], or (None, reason)."""
        at = [i for i, (s, e) in enumerate(offs) if s < b and e > a]
        if not at:
            return None, 'no token covers the code'
        mine = ids[at[0]:at[-1] + 1]
        right = text[b:b + 1]
        for left in ('a' + re.search(r'[\W_]*$', text[max(0, a - 8):a])[0], text[max(0, a - 16):a], text[:a]):
            trie = self.trie(left, right)
            if trie.seqs[self.task.index[code]] == mine:
                return at[0], trie
        return None, 'the code is tokenized differently out of its context'

    def __call__(self, note_id, trace, start):
        """(events, dropped) of one trace; start: tokens before the completion. Rules: METHOD.md, Events.
        An event: phase, code, near_miss, query (token position), target and foils (token ids), merged, start, end."""
        text, task = trace['completion'], self.task
        named = mentions(text, task.index)
        final = set(answer_codes(text, task))
        drop = lambda c, why: {'id': note_id, 'code': c, 'reason': why}
        every = dict.fromkeys([c for _, _, c in named] + [c for c in trace['codes'] if c in task.index])
        if trace['truncated']:
            return [], [drop(c, 'trace truncated') for c in every]
        ids, offs = self.enc.completion(text)
        events, dropped = [], []

        def event(phase, code, first, d, seqs, foils, a, b, near=None, merged=False):
            s, e = offs[first + d]
            events.append({'id': note_id, 'phase': phase, 'code': code, 'near_miss': near, 'query': start + first + d - 1, 'target': seqs[d],
                           'foils': foils, 'margin': None, 'merged': bool(merged), 'start': max(s, a), 'end': min(e, b)})

        for y in every:
            if y not in final:
                dropped.append(drop(y, 'withdrawn: not in the final answer'))
                continue
            places = [(i, a, b) for i, (a, b, c) in enumerate(named) if c == y]
            before, why = len(events), 'no other candidate was possible at any token'
            i, a, b = places[0]
            first, trie = self.locate(text, ids, offs, a, b, y)
            if first is None:
                dropped.append(drop(y, trie))
                continue
            for phase, d, foils, merged in trie.decisions(task.index[y], self.coarse):
                event(phase, y, first, d, trie.seqs[task.index[y]], foils, a, b, merged=merged)
            for i, a, b in places:                                # contrast: the first mention after a near-miss was named
                near = [c for _, _, c in named[:i] if c != y and c not in final]
                same = [c for c in near if task.region[task.index[c]] == task.region[task.index[y]]]
                same = same or [c for c in near if task.chapter[y] and task.chapter[c] == task.chapter[y]]
                if not same:
                    continue
                first, trie = self.locate(text, ids, offs, a, b, y)
                if first is None:
                    why = trie
                    break
                sy, sn = trie.seqs[task.index[y]], trie.seqs[task.index[same[-1]]]
                d = next((d for d in range(min(len(sy), len(sn))) if sy[d] != sn[d]), None)
                if d is not None:
                    event('contrast', y, first, d, sy, [sn[d]], a, b, near=same[-1])
                break
            if len(events) == before:
                dropped.append(drop(y, why))
        if any(e['query'] < 0 for e in events):
            raise Fault(f'note {note_id}: a code opens the whole sequence, so nothing scores its first token')
        return events, dropped

# ------------------------------------------------------------------------------------------------ what heads read, early sites

REGION, LIST, NOTE, NEAR, OTHERS = range(5)              # what an event's attention is summed over: see reading_spans


def list_regions(enc):
    """(P,) region number of each prefix token that belongs to a candidate's entry, -1 elsewhere. An entry is the line that
    names one code; in a line of several it is a code with the words up to its neighbour: those before it, or those behind
    it where the line opens with a code. [A]"""
    text, task = enc.prefix_text, enc.task
    offs = spans(enc.tok, [text])[0][1]
    start, end = (np.array([o[k] for o in offs]) for k in (0, 1))
    out, at = np.full(len(enc.prefix), -1), 0
    for line in text.splitlines(keepends=True):
        named = mentions(line, task.index)
        cuts = [0, *(b for _, b, _ in named[:-1]), len(line.rstrip())] if named and line[:named[0][0]].strip() else [*(a for a, _, _ in named), len(line.rstrip())]
        for a, b, (_, _, code) in zip(cuts, cuts[1:], named):
            out[enc.front + np.arange(np.searchsorted(end, at + a, 'right'), np.searchsorted(start, at + b, 'left'))] = task.region[task.index[code]]
        at += len(line)
    return out


def reading_spans(enc, regions, note, completion, events, total):
    """(n, 5, T) bool: which of a sequence's `total` tokens are, for each event of one note, REGION: the candidate lines of its
    code's region, LIST: the whole list, NOTE: the note's text, NEAR: the near-miss's earlier mentions (contrast), OTHERS:
    equally many tokens of other codes' earlier mentions, nearest to them in distance (METHOD.md, What heads read). regions: list_regions."""
    task, P = enc.task, len(enc.prefix)
    out = np.zeros((len(events), 5, total), bool)
    at = len(enc.before)
    offs = spans(enc.tok, [enc.prompt_text(note)])[0][1]
    words = np.array([s < at + len(note['text']) and e > at for s, e in offs], bool)
    first = P + len(offs)
    offs = enc.completion(completion)[1]
    code = [(first + t, c) for a, b, c in mentions(completion, task.index) for t, (s, e) in enumerate(offs) if s < b and e > a]
    for x, e in zip(out, events):
        x[REGION, :P], x[LIST, :P] = regions == task.region[task.index[e['code']]], regions >= 0
        x[NOTE, P:first] = words
        if e['near_miss']:
            near = [t for t, c in code if c == e['near_miss'] and t <= e['query']]
            other = sorted((min(abs(t - u) for u in near), t) for t, c in code if c not in (e['near_miss'], e['code']) and t <= e['query'])
            if near and len(other) >= len(near):                  # else the event has no control and counts for nothing
                x[NEAR, near], x[OTHERS, [t for _, t in other[:len(near)]]] = True, True
    return torch.from_numpy(out)


class EarlySites:
    """The probe that asks for a code before the trace names it (METHOD.md, Early elicitation): `ids` are appended to a
    trace that is cut; what follows is scored over the first tokens of all codes in that context."""

    def __init__(self, finder):
        self.task = finder.task
        text = self.task.prompt.get('probe', ' (code: ')
        self.trie = finder.trie(text, '')
        ids, offs = spans(finder.enc.tok, [text + self.task.codes[0]])[0]
        shared = os.path.commonprefix(self.trie.seqs) if len(self.trie.seqs) > 1 else []      # tokens that every code opens with
        self.depth = len(shared)
        self.ids = [i for i, (_, e) in zip(ids, offs) if e <= len(text)] + list(shared)
        self.tokens = sorted({s[self.depth] for s in self.trie.seqs if len(s) > self.depth})

    def decision(self, code):
        """(target, own, foils) token ids of a code's region at the probe; None where no first token parts its region."""
        i = self.task.index[code]
        if len(self.trie.seqs[i]) <= self.depth:
            return None
        tokens, region = list(self.trie.path(i))[self.depth]
        own = np.unique(tokens[region == self.task.region[i]])
        foils = np.setdiff1d(tokens, own)
        return (self.trie.seqs[i][self.depth], own.tolist(), foils.tolist()) if len(foils) else None

    @torch.no_grad()
    def logits(self, model, past, cuts):
        """(R, tokens) logits after the probe, appended to the sequence of `past` cut before position cuts[r] (R,)."""
        cuts, S, device = torch.as_tensor(cuts), len(self.ids), model.device
        memory = {l: [x.new_zeros(len(cuts), x.shape[1], S, x.shape[3]) for x in kv] for l, kv in past[-1].items()}
        own_pos = torch.full((len(cuts), S), -1)
        for j, t in enumerate(self.ids):
            own_pos[:, j] = cuts + j
            with Probe(model, past=past, rows=cuts + j, limit=cuts, memory=(memory, own_pos), head=(None, torch.tensor(self.tokens))):
                out = model(input_ids=torch.full((1, len(cuts)), t, device=device), position_ids=(cuts + j)[None].to(device), use_cache=False).logits[0]
        return out.float().cpu()

    def site(self, model, prefix, kv, ids, cut, **probe):
        """One cut trace as a sequence of its own: (ids, segments, Probe). prefix, kv: segments of the whole sequence ids."""
        P = sum(s[0][0].shape[2] for s in prefix)
        past = [*prefix, {l: tuple(x[:, :, :cut - P] for x in s) for l, s in kv.items()}]
        probe = silent(model, self.ids, past, **probe)
        return [*ids[:cut], *self.ids], [*past, probe.kv], probe

# ------------------------------------------------------------------------------------------------ the probe

def causal(q, k, v, start, scale, softcap=None, window=None):
    """Causal attention of q (B,H,T,D) at positions start.. over k, v (B,K,start+T,D) -> (B,H,T,D). Blocks of queries
    with the group folded into them: no T x T, no repeated keys, any window, softcap in fp32."""
    B, H, T, D = q.shape
    K = k.shape[1]
    if start == 0 and not softcap and (window is None or window >= T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, scale=scale, enable_gqa=H != K)
    G, out = H // K, []
    block = max(1, QUERY_BLOCK // G)
    for i in range(0, T, block):
        j = min(i + block, T)
        lo = 0 if window is None else max(0, start + i - window + 1)
        row, col = torch.arange(start + i, start + j, device=q.device)[:, None], torch.arange(lo, start + j, device=q.device)
        mask = (col <= row) if window is None else (col <= row) & (col > row - window)
        mask = mask.repeat(G, 1)                                                              # (G*t, s)
        qq = q[:, :, i:j].reshape(B, K, G * (j - i), D)
        kk, vv = k[:, :, lo:start + j], v[:, :, lo:start + j]
        if softcap:
            s = softcap * torch.tanh((qq @ kk.transpose(2, 3)).float() * scale / softcap)
            z = s.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype) @ vv
        else:
            z = F.scaled_dot_product_attention(qq, kk, vv, attn_mask=mask, scale=scale)
        out.append(z.reshape(B, H, j - i, vv.shape[-1]))
    return torch.cat(out, 2)


def attend(q, k, v, pos, own_k, own_v, own_pos, scale, softcap=None, window=None, blocked=None, weights=False, limit=None):
    """Attention of R rows. q (R,H,D) at positions pos (R,); all share keys k, v (K,P,D) at positions 0..P-1, of which a
    row sees those before limit (default: pos); own_k, own_v (R,K,S,D) at own_pos (R,S) (-1: empty) are the row's alone.
    blocked: None or (heads (R,H) bool, keys (R,P) bool): scores of -inf there. Returns z (R,H,D), and with weights the
    attention (R,H,P+S) in fp32, exactly 0 outside what a row sees."""
    R, H, D = q.shape
    K, P = k.shape[:2]
    G, S = H // K, own_k.shape[2]
    limit = pos if limit is None else limit
    step = max(1, SCORE_BUDGET * (64 if q.is_cuda else 1) // (H * (P + S)))
    order = torch.argsort(pos, stable=True) if R > step else None
    zs, ws = [], []
    for part in [slice(None)] if order is None else order.split(step):        # rows of near positions share a block of keys
        at, end = pos[part], limit[part]
        n = len(at)
        hi = min(P, int(end.max()))
        lo = 0 if window is None else max(0, min(hi, int(at.min()) - window + 1))
        qq = (q[part] * scale).view(n, K, G, D)
        s = (qq.permute(1, 0, 2, 3).reshape(K, n * G, D) @ k[:, lo:hi].transpose(1, 2)).view(K, n, G, hi - lo).float()
        o = (qq @ own_k[part].transpose(2, 3)).transpose(0, 1).float()        # (K,n,G,S)
        if softcap:
            s, o = softcap * torch.tanh(s / softcap), softcap * torch.tanh(o / softcap)
        col, op = torch.arange(lo, hi, device=q.device), own_pos[part]
        hide, ohide = col >= end[:, None], (op < 0) | (op > at[:, None])                       # (n,s), (n,S)
        if window is not None:
            hide, ohide = hide | (col <= at[:, None] - window), ohide | (op <= at[:, None] - window)
        if hide.any():
            s.masked_fill_(hide[None, :, None], -math.inf)
        if S > 1:
            o = o.masked_fill(ohide[None, :, None], -math.inf)
        if blocked is not None:
            heads, keys = blocked[0][part], blocked[1][part][:, lo:hi]
            s.masked_fill_((heads[:, :, None] & keys[:, None]).view(n, K, G, -1).transpose(0, 1), -math.inf)
        top = (torch.maximum(s.amax(-1), o.amax(-1)) if hi > lo else o.amax(-1)).detach()                # (K,n,G)
        s, o = s.sub_(top[..., None]).exp_(), o.sub_(top[..., None]).exp_()
        den = (s.sum(-1) + o.sum(-1))[..., None]
        z = (s.to(v.dtype).reshape(K, n * G, hi - lo) @ v[:, lo:hi]).view(K, n, G, -1) + (o.transpose(0, 1).to(v.dtype) @ own_v[part]).transpose(0, 1)
        zs.append((z / den.to(z.dtype)).transpose(0, 1).reshape(n, H, -1))
        if weights:
            w = torch.cat([F.pad(s / den, (lo, P - hi)), o / den], -1)
            ws.append(w.transpose(0, 1).reshape(n, H, P + S))
    if order is None:
        return zs[0], ws[0] if weights else None
    back = torch.argsort(order)
    return torch.cat(zs)[back], torch.cat(ws)[back] if weights else None


class Probe:
    """What one forward of `model` captures and changes; nothing of it outlives the `with` block.

    past        list of segments {layer: (k, v)}, each (1,K,t,D): keys shared by every query, never written to
    keep_kv     capture the pass's own keys and values as a segment: probe.kv
    z_at        flat positions (b*T+t) whose z is captured: probe.z[layer] (n,H,D)
    attn_at     (b (n,), t (n,)) queries whose attention is captured, in attn_layers or all: probe.attn[layer] (n,H,P+T) fp32
    attn_map    a function of it, stored in its place (to keep sums over spans, not rows of T)
    rows        positions (R,) of rows: the tokens of this forward see `past` before them and themselves, nothing else
    limit       with rows: (R,) a row sees `past` before limit in place of its position (a trace that is cut there)
    memory      with rows: (segment {layer: [k, v]} of (R,K,S,D) buffers, own_pos (R,S)) a row's own past (decoding)
    edit        (mask (R,L,H) bool, bank (N,L,H,D), index (R,)): z of the masked heads is set to bank[index]
    blocked     (mask (R,L,H) bool, keys (R,P) bool): those heads do not see those keys
    delta       (L,R,H,D) added to z after edits; its gradient is the gradient of z
    restart     (null (R,), first (R,)): rows join at layer first as copies of row null (rows sorted by first, nulls first)
    head        (flat positions or None, token ids or None): the output head sees and scores only these; token ids 'hidden':
                it scores nothing, probe.hidden (n,C) is what it was to see
    edits address rows, or flat positions `edit_at` (n,) of a clean pass, one rule for both.
    """
    active = None

    def __init__(self, model, past=(), keep_kv=False, z_at=None, attn_at=None, attn_layers=None, attn_map=None, rows=None, limit=None, memory=None,
                 edit=None, edit_at=None, blocked=None, delta=None, restart=None, head=None):
        self.__dict__.update({k: v for k, v in locals().items() if k != 'self'})
        self.kv, self.z, self.attn, self.modules, self.shapes = {}, {}, {}, [], []

    def __enter__(self):
        if Probe.active is not None:
            raise RuntimeError('a Probe is active already')
        self.undo = []
        if self.restart is not None:
            for l, block in enumerate(self.model.probe_layers):
                self.undo.append(block.register_forward_pre_hook(self.join(l), with_kwargs=True).remove)
        if self.head is not None:
            out = self.model.get_output_embeddings()
            self.undo.append(lambda: out.__dict__.pop('forward', None))
            out.forward = self.project(out)
        Probe.active = self
        return self

    def __exit__(self, *_):
        Probe.active = None
        for f in self.undo:
            f()

    def project(self, out):
        at, ids = self.head

        def forward(hidden):                                      # (B,T,C) -> (1,n,U)
            if at is not None:
                hidden = hidden.reshape(1, -1, hidden.shape[-1])[:, at.to(hidden.device)]
            if isinstance(ids, str):                              # 'hidden': the head is applied by the caller
                out.__dict__.pop('forward', None)
                self.hidden = hidden[0]
                return hidden[..., :1]
            if ids is None:
                return type(out).forward(out, hidden)
            i = ids.to(out.weight.device)
            return F.linear(hidden, out.weight[i], None if getattr(out, 'bias', None) is None else out.bias[i])
        return forward

    def join(self, l):
        null, first = self.restart
        n, R = int((first <= l).sum()), len(first)

        def cut(x):                                               # position embeddings and ids of the rows present
            if isinstance(x, (tuple, list)):
                return type(x)(cut(y) for y in x)
            return x[:, :n] if torch.is_tensor(x) and x.dim() > 1 and x.shape[:2] == (1, R) else x

        def hook(block, args, kwargs):
            hidden = args[0] if args else kwargs['hidden_states']
            if hidden.shape[1] > n:
                hidden = hidden[:, :n]
            elif hidden.shape[1] < n:
                hidden = torch.cat([hidden, hidden[:, null[hidden.shape[1]:n].to(hidden.device)]], 1)
            kwargs = {k: cut(v) for k, v in kwargs.items()}
            if args:
                return (hidden, *cut(args[1:])), kwargs
            return args, kwargs | {'hidden_states': hidden}
        return hook

    def run(self, module, q, k, v, scale, softcap, window):
        """One layer: q (B,H,T,D), k, v (B,K,T,D) after RoPE -> z (B,T,H,D)."""
        l, (B, H, T, _) = module.layer_idx, q.shape
        if self.rows is None and module not in self.modules:
            self.modules.append(module)
            self.shapes.append((H, v.shape[-1]))
        if self.keep_kv:
            self.kv[l] = (k, v)
        if self.rows is None:
            P = sum(seg[l][0].shape[2] for seg in self.past)
            if self.past:
                k = torch.cat([*(s[l][0].expand(B, -1, -1, -1) for s in self.past), k], 2)
                v = torch.cat([*(s[l][1].expand(B, -1, -1, -1) for s in self.past), v], 2)
            z = causal(q, k, v, P, scale, softcap, window).transpose(1, 2)                     # (B,T,H,D)
            if self.attn_at is not None and (self.attn_layers is None or l in self.attn_layers):
                w = self.attention_rows(q, k, v, P, scale, softcap, window)
                self.attn[l] = self.attn_map(w) if self.attn_map else w
        else:
            m = T                                                 # rows that join here are still copies of their null row: so is their attention
            if self.restart is not None and self.blocked is None:
                m = int((self.restart[1] < l).sum())
            z = self.rows_attention(l, q[:, :, :m], k[:, :, :m], v[:, :, :m], scale, softcap, window)
            z = (torch.cat([z, z[self.restart[0][m:T].to(z.device)]]) if m < T else z)[None]
        flat = z.reshape(B * T, H, -1)
        if self.edit is not None:
            mask, bank, index = self.edit
            put = self.edit_at.to(z.device) if self.edit_at is not None else torch.arange(T, device=z.device)
            n = len(put)
            value = bank[index[:n].to(bank.device), l].to(z.device, z.dtype)                   # (n,H,D)
            new = torch.where(mask[:n, l, :, None].to(z.device), value, flat[put])
            flat = new if self.edit_at is None else flat.index_put((put,), new)
        if self.delta is not None:
            flat = flat + self.delta[l].to(z.device, z.dtype)
        if self.z_at is not None:
            self.z[l] = flat[self.z_at.to(z.device)]
        return flat.view(B, T, H, -1)

    def attention_rows(self, q, k, v, P, scale, softcap, window):
        """Attention weights of the queries attn_at = (b (n,), t (n,)), recomputed beside sdpa: (n,H,P+T), fp32."""
        b, t = (x.to(q.device) for x in self.attn_at)
        parts, order, col = [], [], torch.arange(k.shape[2], device=q.device)
        for i, (qi, ki) in enumerate(zip(q.unbind(0), k.unbind(0))):        # unbind: indexing's backward would fill a whole batch of zeros for each
            m = (b == i).nonzero()[:, 0]
            if not len(m):
                continue
            own = t[m, None] + P
            s = (scale * qi[:, t[m]].reshape(k.shape[1], -1, q.shape[3]) @ ki.transpose(1, 2)).view(q.shape[1], len(m), -1).float()
            s = softcap * torch.tanh(s / softcap) if softcap else s
            hide = col > own if window is None else (col > own) | (col <= own - window)
            parts.append(s.masked_fill(hide, -math.inf).softmax(-1).transpose(0, 1))
            order.append(m)
        return torch.cat(parts)[torch.argsort(torch.cat(order))]

    def rows_attention(self, l, q, k, v, scale, softcap, window):
        R = q.shape[2]
        pos = self.rows[:R].to(q.device)
        sk, sv = (torch.cat([s[l][i][0] for s in self.past], 1) for i in (0, 1)) if self.past else (k[0, :, :0], v[0, :, :0])
        own_k, own_v = k[0].transpose(0, 1)[:, :, None], v[0].transpose(0, 1)[:, :, None]      # (R,K,1,D)
        own_pos = pos[:, None]
        if self.memory is not None:
            segment, own_pos = self.memory[0], self.memory[1].to(q.device)
            bk, bv = segment[l]
            slot = (own_pos == pos[:, None]).int().argmax(1)
            bk[torch.arange(R), :, slot], bv[torch.arange(R), :, slot] = own_k[:, :, 0], own_v[:, :, 0]
            own_k, own_v = bk, bv
        blocked = None
        if self.blocked is not None and self.blocked[0][:R, l].any():
            blocked = (self.blocked[0][:R, l].to(q.device), self.blocked[1][:R].to(q.device))
        limit = None if self.limit is None else self.limit[:R].to(q.device)
        want = self.attn_at is not None and (self.attn_layers is None or l in self.attn_layers)
        z, w = attend(q[0].transpose(0, 1), sk, sv, pos, own_k, own_v, own_pos, scale, softcap, window, blocked, want, limit)
        if want:
            self.attn[l] = self.attn_map(w) if self.attn_map else w
        return z


def probe_attention(module, query, key, value, attention_mask=None, scaling=None, softcap=None, sliding_window=None, **kw):
    """The function registered with transformers. Without an active Probe: plain causal attention."""
    for extra in ('s_aux', 'position_bias'):
        if kw.get(extra) is not None:
            raise NotImplementedError(f'{type(module).__name__} uses {extra} in its attention, which the probe does not know')
    if getattr(module, 'is_causal', True) is False or kw.get('dropout'):
        raise NotImplementedError(f'{type(module).__name__}: only causal attention without dropout')
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if Probe.active is None:
        return causal(query, key, value, key.shape[2] - query.shape[2], scaling, softcap, sliding_window).transpose(1, 2), None
    return Probe.active.run(module, query, key, value, scaling, softcap, sliding_window), None


def probe_mask(*args, attention_mask=None, **kw):
    """Causality, window and rows are the attention function's own; padding stands on the right, where causality hides it."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError('the probe takes no padding mask: pad on the right and leave attention_mask out')
    return None


def register():
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register('probe', probe_attention)
    AttentionMaskInterface.register('probe', probe_mask)

# ------------------------------------------------------------------------------------------------ forwards

def prefill(model, ids, past=(), **probe):
    """The clean pass over ids (list or (B,T)) behind `past`. Returns (logits, Probe); see Probe for what it captures."""
    ids = torch.as_tensor(ids, device=model.device)
    ids = ids[None] if ids.dim() == 1 else ids
    start = sum(s[0][0].shape[2] for s in past)
    pos = torch.arange(start, start + ids.shape[1], device=model.device)[None]
    with Probe(model, past=past, **probe) as p:
        logits = model(input_ids=ids, position_ids=pos.expand(len(ids), -1), use_cache=False).logits
    return logits, p


@torch.no_grad()
def silent(model, ids, past=(), keep_kv=True, **probe):
    """The clean pass for what the probe captures alone: no gradient, one logit. Returns the Probe."""
    return prefill(model, ids, past, keep_kv=keep_kv, head=(torch.tensor([0]), torch.tensor([0])), **probe)[1]


@torch.no_grad()
def prefix_kv(model, enc):
    """The candidate list's keys and values, read once and shared by every note: a list with one segment (or none)."""
    if not enc.prefix:
        return []
    return [silent(model, enc.prefix).kv]


def row_forward(model, past, token, pos, ids, null=None, first=None, **probe):
    """Logits (R,U) at token ids `ids` of R rows: token (R,), pos (R,). With null and first (layer restart) a row is
    computed only from layer first[r] on; row null[r] must be its unedited twin. Edits: see Probe."""
    order = None
    if first is not None:
        order = torch.argsort(first, stable=True)
        back = torch.argsort(order)
        token, pos = token[order], pos[order]
        probe = {k: (v[0][order], v[1], v[2][order]) if k == 'edit' else (v[0][order], v[1][order]) for k, v in probe.items()}
        probe['restart'] = (back[null][order], first[order])
    with Probe(model, past=past, rows=pos, head=(None, ids), **probe) as p:
        logits = model(input_ids=token[None].to(model.device), position_ids=pos[None].to(model.device), use_cache=False).logits[0]
    logits = logits.float()
    return (logits if order is None else logits[back.to(logits.device)]), p


def scored(events):
    """Token ids (U,) that the events' margins need, target index (E,), foil mask (E,U)."""
    ids = sorted({t for e in events for t in [e['target'], *e['foils']]})
    at = {t: i for i, t in enumerate(ids)}
    foil = torch.zeros(len(events), len(ids), dtype=torch.bool)
    for i, e in enumerate(events):
        foil[i, [at[t] for t in e['foils']]] = True
    return torch.tensor(ids), torch.tensor([at[e['target']] for e in events]), foil


def margin(logits, target, foil, how='max'):
    """Target logit minus the foils' maximum (or log-sum-exp), fp32: logits (n,U), target (n,), foil (n,U) bool -> (n,)."""
    logits = logits.float()
    target, foil = target.to(logits.device), foil.to(logits.device)
    others = logits.masked_fill(~foil, -math.inf)
    others = others.amax(-1) if how == 'max' else others.logsumexp(-1)
    return logits.gather(-1, target[:, None])[:, 0] - others


def rows_per_chunk(model, asked=0):
    """Rows of one forward: --rows, or a tenth of free memory over what a row's activations take."""
    if asked:
        return asked
    c = model.config.get_text_config()
    per_row = 4 * (12 * c.hidden_size + 4 * (getattr(c, 'intermediate_size', None) or 4 * c.hidden_size))
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == 'cuda' else os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return int(min(4096, max(64, 0.1 * free / per_row)))


@torch.no_grad()
def measure(model, past, ids, events, event, edit=None, blocked=None, rows=0, how='max', restart=True, pair=None):
    """Runs R counterfactuals of one note. ids: token ids of the whole sequence; past: its segments; event (R,): which of
    `events` a row belongs to; edit, blocked: as in Probe, over R. Returns (value, null), each (R,) fp32: the margin of the
    row and of its event's null row in the same forward. pair (R,2): score logit[a] - logit[b] in place of the margin."""
    event, L = torch.as_tensor(event), model.probe_shape[0]
    R = len(event)
    token, pos = (torch.tensor(x) for x in ([ids[e['query']] for e in events], [e['query'] for e in events]))
    width, target, foil = scored(events)
    if pair is not None:
        width, pair = torch.unique(pair, return_inverse=True)
    first = torch.full((R,), L - 1)
    for m in (edit, blocked):
        if m is not None:
            hit = m[0].any(-1)                                                               # (R,L)
            first = torch.where(hit.any(1), torch.minimum(first, hit.int().argmax(1)), first)
    value, null_value = torch.zeros(R), torch.zeros(R)
    for part in torch.argsort(event, stable=True).split(rows_per_chunk(model, rows)):
        here, null = torch.unique(event[part], return_inverse=True)                          # null rows come first
        n, every = len(here), torch.cat([here, event[part]])
        pad = lambda x: torch.cat([x.new_zeros(n, *x.shape[1:]), x[part]])
        probe = {}
        if edit is not None:
            probe['edit'] = (pad(edit[0]), edit[1], pad(edit[2]))
        if blocked is not None:
            probe['blocked'] = (pad(blocked[0]), pad(blocked[1]))
        if restart:
            probe |= {'null': torch.cat([torch.arange(n), null]), 'first': torch.cat([torch.full((n,), -1), first[part]])}
        logits, _ = row_forward(model, past, token[every], pos[every], width, **probe)
        logits = logits.cpu()
        for out, x in ((value, logits[n:]), (null_value, logits[:n][null])):
            out[part] = margin(x, target[event[part]], foil[event[part]], how) if pair is None else x.gather(1, pair[part]).diff(dim=1)[:, 0].neg()
    return value, null_value


def margin_gradient(model, past, ids, events, edit=None, index=None, how='max'):
    """d margin / d z (n,L,H,D) at the query of events[index[i]], one row each, all in one backward. edit: as in Probe."""
    index = torch.arange(len(events)) if index is None else torch.as_tensor(index)
    L, H, D = model.probe_shape
    token, pos = (torch.tensor([f(events[i]) for i in index]) for f in (lambda e: ids[e['query']], lambda e: e['query']))
    width, target, foil = scored(events)
    delta, training = torch.zeros(L, len(index), H, D, requires_grad=True), model.training
    model.eval()                                                  # no dropout, and no checkpointing: its replay would run without the probe
    with torch.enable_grad():
        logits, _ = row_forward(model, past, token, pos, width, delta=delta, **({'edit': edit} if edit else {}))
        grad, = torch.autograd.grad(margin(logits, target[index], foil[index], how).sum(), delta)
    model.train(training)
    return grad.transpose(0, 1)


def attribution(model, past, ids, events, z, mu, ig=0, how='max'):
    """a[e,l,h] = <dm/dz, z - mu>: the first-order drop of the margin under mean-ablation (METHOD.md). z, mu (E,L,H,D) ->
    (E,L,H). ig > 0: the gradient is the mean over ig points on the line from mu to z, all heads moved together."""
    E, (L, H, D) = len(events), model.probe_shape
    if not ig:
        return (margin_gradient(model, past, ids, events, how=how) * (z - mu)).sum(-1)
    index = torch.arange(E).repeat_interleave(ig)
    alpha = ((torch.arange(ig) + 0.5) / ig).repeat(E)[:, None, None, None]                   # midpoints
    bank = mu[index] + alpha * (z - mu)[index]
    edit = (torch.ones(E * ig, L, H, dtype=torch.bool), bank, torch.arange(E * ig))
    g = margin_gradient(model, past, ids, events, edit, index, how)
    return (g.view(E, ig, L, H, D).mean(1) * (z - mu)).sum(-1)


def loo_means(z, events, discovery, every=PHASES):
    """mean(note, phase) -> mu (L,H,D): mean of z (E,L,H,D) over the phase's events in discovery notes other than `note`;
    each event counts once (METHOD.md). Raises Fault where fewer than two other notes have such events. Also returns the
    phases with events in at least three discovery notes, where every such mean exists."""
    total = {p: {} for p in every}
    for e, x in zip(events, z):
        if e['id'] in discovery:
            s, n = total[e['phase']].get(e['id'], (0, 0))
            total[e['phase']][e['id']] = (s + x.double(), n + 1)
    whole_sum = {p: (sum(s for s, _ in t.values()), sum(n for _, n in t.values())) for p, t in total.items()}

    def mean(note, phase):
        own_sum, own_n = total[phase].get(note, (0, 0))
        if len(total[phase]) - (note in total[phase]) < 2:
            raise Fault(f'{phase}: the mean for note {note} needs events in at least 2 other discovery notes')
        return ((whole_sum[phase][0] - own_sum) / (whole_sum[phase][1] - own_n)).float()
    return mean, [p for p in every if len(total[p]) > 2]

# ------------------------------------------------------------------------------------------------ what a stage left

def read_events(run):
    """(events.jsonl, events.safetensors) of a run folder."""
    return [r for _, r in read_jsonl(run / 'events.jsonl', ('event', 'id', 'phase', 'query', 'target', 'foils'))], load_file(run / 'events.safetensors')


def load_heads(run, size=0):
    """{phase: [(l, h)]} selected by characterize.py, best first; size > 0: the top `size` of the calibrated ranking."""
    ranked = {p: [] for p in PHASES}
    for _, r in read_jsonl(run / 'heads.jsonl', ('phase', 'layer', 'head', 'rank', 'calibrated', 'selected')):
        if r['calibrated'] is not None and (r['rank'] <= size if size else r['selected']):
            ranked[r['phase']].append((r['rank'], r['layer'], r['head']))
    return {p: [(l, h) for _, l, h in sorted(x)] for p, x in ranked.items()}

def open_run(args, stage, keys):
    """What a stage after characterize.py starts from: (task, run, model, encoder, traces, events, tensors), or None where
    it is done already. keys: the arguments that its results depend on."""
    task, run = load_task(args.work), run_dir(args)
    if not (run / 'heads.jsonl').exists():
        raise Fault(f'{run} has no heads.jsonl; run characterize.py first')
    settings = {k: getattr(args, k) for k in ('model', 'dtype', 'chat', 'margin', 'seed', *keys)}
    settings |= {'task': task.hash, 'weights': folder_hash(args.model), 'events': folder_hash(run / 'events.jsonl'), 'heads': folder_hash(run / 'heads.jsonl')}
    if begin(run, stage, settings):
        return print(f'{run}: {stage} is done already')
    model = load_model(args.model, args.dtype, args.device, args.device_map)
    return task, run, model, load_encoder(args.model, model, task, args.chat), load_traces(run / 'traces.jsonl', task), *read_events(run)

# ------------------------------------------------------------------------------------------------ statistics

def by_note(values, notes):
    """Per-note sums: values (E,...) and notes (E,) -> (ids, (N,...) sums, (N,) counts). Notes, not events, are the unit."""
    ids, at = np.unique(notes, return_inverse=True)
    values = np.asarray(values, np.float64)
    out = np.zeros((len(ids), *values.shape[1:]))
    np.add.at(out, at, values)
    return ids, out, np.bincount(at, minlength=len(ids))


def note_means(values, notes):
    """(N,...) means of values (E,...) over each note's events, notes sorted: what claims average and resample."""
    _, total, count = by_note(values, notes)
    return total / count.reshape(-1, *[1] * (total.ndim - 1))


def resamples(n, seed, draws=2000):
    """(draws, n) indices: notes drawn with replacement."""
    return np.random.default_rng(seed).integers(0, n, (draws, n))


def interval(boot, n):
    """95 % interval of a bootstrap distribution over n notes: percentiles widened for small n, as a t interval is against
    a normal one (Hesterberg 2015, The American Statistician 69(4), expanded percentile interval). (low, high)."""
    from scipy.stats import norm, t
    a = 2.5 if n < 2 else 100 * norm.cdf((n / (n - 1)) ** 0.5 * t.ppf(0.025, n - 1))
    return tuple(float(x) for x in np.nanpercentile(boot, [a, 100 - a]))


def ratio_interval(num, den, seed=0):
    """sum(num) / sum(den) over notes (N,) with a 95 % bootstrap interval over notes: (value, low, high). A denominator
    whose own interval holds zero is near zero: (None, None, None), never divided by."""
    num, den = np.asarray(num, float), np.asarray(den, float)
    if not len(num):
        return None, None, None
    pick = resamples(len(num), seed)
    n, d = num[pick].sum(1), den[pick].sum(1)
    low, high = interval(d, len(num))
    if low <= 1e-6 and high >= -1e-6:
        return None, None, None
    return float(num.sum() / den.sum()), *interval(n / np.where(d == 0, np.nan, d), len(num))


def mean_interval(x, seed=0):
    """Mean over notes of per-note means x (N,), 95 % bootstrap interval over notes; None where there are no notes."""
    return ratio_interval(x, np.ones(len(x)), seed)


def wilson(k, n):
    """k of n with the 95 % Wilson interval (scipy): (share, low, high)."""
    if n == 0:
        return None, None, None
    from scipy.stats import binomtest
    ci = binomtest(int(k), int(n)).proportion_ci(method='wilson')
    return k / n, float(ci.low), float(ci.high)


def knockin_summary(donor, same, seed=0):
    """Recovery, share of notes above the 95th percentile of their controls, and same-answer shift / donor shift: each
    (value, low, high), notes resampled; control: 95th percentile over random sets of the same ratio."""
    who = [r['id'] for r in donor]
    gain = by_note([r['d_patched'] - r['d_rec'] for r in donor], who)[1]
    den = by_note([r['d_src'] - r['d_rec'] for r in donor], who)[1]
    out = {'recovery': ratio_interval(gain, den, seed), 'control': None, 'pass': (None,) * 3, 'same': (None,) * 3, 'n': len(den)}
    if donor[0]['controls']:
        rand = by_note([[c - r['d_rec'] for c in r['controls']] for r in donor], who)[1]
        out['control'] = None if out['recovery'][0] is None else float(np.percentile(rand.sum(0) / den.sum(), 95))
        beat = gain > np.percentile(rand, 95, axis=1)
        out['pass'] = wilson(beat.sum(), len(beat))
    if same:
        partner = {r['recipient']: r for r in donor}
        both = [(r, partner[r['recipient']]) for r in same if r['recipient'] in partner]
        who = [r['id'] for r, _ in both]
        out['same'] = ratio_interval(by_note([abs(r['d_patched'] - r['d_rec']) for r, _ in both], who)[1],
                                     by_note([abs(d['d_patched'] - d['d_rec']) for _, d in both], who)[1], seed)
    return out


def head_mask(heads, shape):
    """(L,H) bool of a list of (l,h)."""
    mask = np.zeros(shape, bool)
    mask[tuple(np.array(heads).T)] = True
    return mask


def random_sets(heads, n, shape, seed):
    """n random head sets of the size and layer histogram of `heads` (list of (l,h)), none containing a head of it:
    ((n,L,H) bool, layers_matched). A layer with too few heads left: matched by size alone. Too few in all: Fault."""
    L, H = shape
    rng = np.random.default_rng(seed)
    mine = head_mask(heads, shape)
    count = mine.sum(1)
    matched = bool((H - count >= count).all())
    free = np.argwhere(~mine)
    if len(free) < len(heads):
        raise Fault(f'no random control: {len(heads)} heads of {L * H} selected, {len(free)} left')
    out = np.zeros((n, L, H), bool)
    for i in range(n):
        if matched:
            for l in np.flatnonzero(count):
                out[i, l, rng.choice(np.flatnonzero(~mine[l]), count[l], replace=False)] = True
        else:
            out[i][tuple(free[rng.choice(len(free), len(heads), replace=False)].T)] = True
    return out, matched
