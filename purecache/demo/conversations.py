"""What the demo talks about: several users, each with turns on a chapter of the Python documentation, or recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from purecache.demo.scheduler import Engine, Request
from purecache.demo.tokenizer import Tokenizer
from purecache.demo.weights import DemoError

SYSTEM_PROMPTS = (
    "You are a patient teacher of Python. Answer from the chapter of the language reference that the user gives you, "
    "in one or two short sentences, and do not invent anything. For orientation, this is how the reference speaks of "
    "objects:\n\n",
    "You review Python code for a living. Answer every question from the chapter of the language reference that comes "
    "with it, briefly and with the exact terms of the reference. Keep in mind how names are bound:\n\n",
)
SYSTEM_TOPICS = ("objects", "naming")
SYSTEM_CHARACTERS = 600
CHAPTERS = ("compound", "formatstrings", "typesseq", "debugger", "attribute-access", "customization", "assignment")
QUESTIONS = (
    "What is this chapter about?",
    "Which rule in it do beginners break most often?",
    "Name one term that the chapter defines and say what it means.",
    "Which error can occur here, and when?",
    "Give one short example that fits the chapter.",
)


@dataclass(frozen=True)
class Script:
    """One conversation, before anybody answered."""

    name: str
    pieces: tuple[np.ndarray, ...]  # int32[n] each: what comes before each answer
    limits: tuple[int, ...]  # most tokens of each answer
    cumulative: bool  # whether a prompt is all pieces and answers so far, or its own piece alone

    @property
    def longest(self) -> int:
        """Most tokens that a request of this conversation can have, its answer included."""
        lengths = [len(piece) + limit for piece, limit in zip(self.pieces, self.limits, strict=True)]
        return sum(lengths) if self.cumulative else max(lengths)

    def prompt(self, answers: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the prompt that follows the given answers, int32[n]."""
        turn = len(answers)
        if not self.cumulative:
            return self.pieces[turn]
        parts = [self.pieces[0]]
        for answer, piece in zip(answers, self.pieces[1 : turn + 1], strict=True):
            parts += [np.asarray(answer, np.int32), piece]
        return np.concatenate(parts)


def manual_scripts(
    tokenizer: Tokenizer, users: int, documents: int, turns: int, document_tokens: int, limit: int
) -> list[Script]:
    """Return conversations of `users` people about `documents` chapters, `turns` questions each.

    Users with the same chapter share the system prompt and the chapter; there are two system prompts. A chapter is cut
    to `document_tokens` tokens, an answer to `limit`. Raises DemoError when there are not that many chapters.
    """
    if not 1 <= documents <= len(CHAPTERS):
        raise DemoError(f"There are {len(CHAPTERS)} documents to choose from, --documents {documents} does not fit.")
    if min(users, turns, document_tokens, limit) < 1:
        raise DemoError("--users, --turns, --document-tokens and --answer-tokens must be at least 1.")
    openings = []
    for index in range(documents):
        which = index % len(SYSTEM_PROMPTS)
        system = SYSTEM_PROMPTS[which] + topics[SYSTEM_TOPICS[which]][:SYSTEM_CHARACTERS]
        chapter = tokenizer.encode(topics[CHAPTERS[index]].strip())[:document_tokens]
        openings.append((system, tokenizer.decode(chapter)))
    scripts = []
    for user in range(users):
        system, chapter = openings[user % documents]
        pieces = []
        for turn in range(turns):
            # Users differ in the order of their questions, so that they share the chapter and not the whole prompt.
            question = QUESTIONS[(turn + user // documents) % len(QUESTIONS)]
            if turn == 0:
                parts = [tokenizer.message("system", system), tokenizer.message("user", f"{chapter}\n\n{question}")]
            else:
                parts = [tokenizer.answer_end(), tokenizer.message("user", question)]
            pieces.append(np.concatenate([*parts, tokenizer.answer_start()]))
        scripts.append(Script(f"user {user + 1}", tuple(pieces), (limit,) * turns, cumulative=True))
    return scripts


def recorded_scripts(path: str, sessions: int, calls: int, context: int, limit: int) -> tuple[list[Script], int]:
    """Read recorded conversations from an npz file: (scripts, calls left out because their context is too long).

    The file has `tokens` (ids of all prompts one after the other), `offsets` int64[calls + 1], `session` [calls], and
    perhaps `output_tokens` [calls]. The first `calls` calls of the first `sessions` sessions are taken, in the order of
    the file; an answer has the recorded length, at most `limit`. Raises DemoError when the file is something else.
    """
    if not Path(path).is_file():
        raise DemoError(f"--tokens {path}: there is no such file.")
    try:
        with np.load(path) as data:
            tokens, offsets, owners = data["tokens"], data["offsets"], data["session"]
            lengths = data["output_tokens"] if "output_tokens" in data else np.full(len(owners), limit)
    except (KeyError, ValueError, OSError) as problem:
        raise DemoError(
            f"--tokens {path}: expected an npz file with tokens, offsets and session ({problem})."
        ) from problem
    scripts, left_out = [], 0
    for name in list(dict.fromkeys(owners.tolist()))[:sessions]:
        pieces, limits = [], []
        for call in np.flatnonzero(owners == name)[:calls]:
            prompt = tokens[offsets[call] : offsets[call + 1]].astype(np.int32)
            answer = int(np.clip(lengths[call], 1, limit))
            if len(prompt) + answer > context:
                left_out += 1
                continue
            pieces.append(prompt)
            limits.append(answer)
        if pieces:
            scripts.append(Script(str(name), tuple(pieces), tuple(limits), cumulative=False))
    if not scripts:
        raise DemoError(f"--tokens {path}: no call fits into a context of {context} tokens: raise --context.")
    return scripts, left_out


def converse(engine: Engine, scripts: Sequence[Script], progress: Callable[[Request | None], None]) -> list[Request]:
    """Hold all conversations at once; a user asks on as soon as the answer is there.

    Calls `progress` after every step, with a request that has just finished or with None. Returns the finished
    requests, conversation by conversation and turn by turn.
    """
    done: dict[str, list[Request]] = {script.name: [] for script in scripts}
    owner: dict[Request, Script] = {}

    def ask(script: Script) -> None:
        turn = len(done[script.name])
        if turn < len(script.pieces):
            prompt = script.prompt([request.answer for request in done[script.name]])
            request = Request(f"{script.name}, turn {turn + 1}", prompt, script.limits[turn])
            owner[request] = script
            engine.submit(request)

    for script in scripts:
        ask(script)
    while not engine.idle:
        progress(None)
        for request in engine.step():
            done[owner[request].name].append(request)
            progress(request)
            ask(owner[request])
    return [request for script in scripts for request in done[script.name]]
