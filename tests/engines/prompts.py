"""Workloads: short chats over shared system prompts, and random token ids for models without a tokenizer. Seeded, written for kvtape."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SYSTEM_PROMPTS = (
    "You are the night clerk of a small railway station in the hills. Trains are few and often late. You know the timetable by heart, the "
    "name of every stop on the line, and where to find hot tea at three in the morning. Answer travellers in two or three plain sentences, "
    "never invent a train, and say so when you do not know.",
    "You help people repair bicycles. They write from the roadside, often with cold hands and little light. Ask for nothing that needs a "
    "workshop. Name the tool, name the part, then give the steps in order, each in one short sentence. If riding on would be dangerous, "
    "begin with that.",
    "You are a patient teacher of arithmetic for adults who missed it at school. Show every step on its own line. Use prices, recipes and "
    "distances as examples. Praise sparingly and honestly. When an answer is wrong, find the step where it went wrong and start again "
    "from there, without hurry.",
)

QUESTIONS = (
    "When does the last train leave?",
    "Is there a connection to the coast tonight?",
    "My chain keeps jumping off. What can I do?",
    "What is seven times thirteen?",
    "The waiting room is locked. Where can I sit?",
    "How do I split a bill of 84 among six people?",
    "The front brake squeals in the rain.",
    "Why is one half the same as two quarters?",
    "I left an umbrella on the morning train.",
    "How long does it take to walk to the village?",
    "There is a slow leak in my rear tyre.",
    "A recipe for four needs 300 grams of flour. And for ten?",
    "Can I bring a dog?",
    "My saddle slides down while I ride.",
    "What is fifteen percent of 240?",
    "Which side has the better view of the valley?",
    "One spoke is broken. Can I ride home?",
    "I walk four kilometres in fifty minutes. How fast is that?",
    "Does the ticket machine take coins?",
    "The gears will not go to the lowest.",
    "If 3 pens cost 2.40, what do 5 cost?",
    "Is the line open in heavy snow?",
    "What should I carry in a small tool bag?",
    "How do I check a long division?",
    "Who do I call when nobody is at the counter?",
    "My pedal clicks once every turn.",
    "Explain why we carry the one.",
    "Thank you. And on Sundays?",
    "Could you say that more simply?",
    "Please give me one more example.",
)


@dataclass(frozen=True)
class Chat:
    """One conversation: its system prompt and what the person says, turn by turn."""

    name: str
    system: str
    turns: tuple[str, ...]
    #: Tokens asked for at each turn.
    max_tokens: tuple[int, ...]


def chats(count: int, turns: int, seed: int, *, shortest: int = 12, longest: int = 48) -> list[Chat]:
    """``count`` conversations of ``turns`` turns each; the system prompts are shared among them."""
    draw = random.Random(seed)
    return [
        Chat(
            f"chat-{number}",
            draw.choice(SYSTEM_PROMPTS),
            tuple(draw.choice(QUESTIONS) for _ in range(turns)),
            tuple(draw.randint(shortest, longest) for _ in range(turns)),
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class TokenRequest:
    """One request to an engine that is given token ids."""

    name: str
    input_ids: list[int]
    max_tokens: int


class TokenChats:
    """Conversations of random token ids; what the engine answered becomes part of the next turn's input.

    Args:
        vocabulary: ids are drawn from ``[100, vocabulary)``: the special ones are below.
        scale: prompts are this many times as long as those for the smallest pool.
        shared: conversations begin with one of a few prefixes, or each with its own.
        longest: a conversation whose next turn would need more tokens starts anew, on a prefix.
    """

    def __init__(
        self, count: int, seed: int, *, vocabulary: int, longest: int, scale: int = 1, shared: bool = True
    ) -> None:
        self._draw = random.Random(seed)
        self._vocabulary = vocabulary
        self._longest = longest
        self._scale = scale
        self._prefixes = [
            self._ids(scale * self._draw.randint(24, 40)) for _ in range(4 if shared else count)
        ]
        self._shared = shared
        self._histories = [self._prefix(index) for index in range(count)]

    def turn(self, number: int) -> list[TokenRequest]:
        """The requests of turn ``number``, one a conversation."""
        requests = []
        for index in range(len(self._histories)):
            new = self._ids(self._scale * self._draw.randint(4, 30))
            wanted = self._draw.randint(8, 40)
            if len(self._histories[index]) + len(new) + wanted > self._longest:
                self._histories[index] = self._prefix(index)
            self._histories[index] += new
            requests.append(TokenRequest(f"chat-{index}-turn-{number}", list(self._histories[index]), wanted))
        return requests

    def answered(self, index: int, output_ids: list[int]) -> None:
        self._histories[index] += output_ids

    def _prefix(self, index: int) -> list[int]:
        return list(self._draw.choice(self._prefixes) if self._shared else self._prefixes[index])

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(100, self._vocabulary) for _ in range(count)]


@dataclass
class ChatHistories:
    """What each chat has said so far, as token ids of its next turn; cut to its newest turns when it would not fit.

    Args:
        tokenizer: of transformers, with a chat template.
        longest: tokens of a turn, the answer counted.
    """

    conversations: list[Chat]
    tokenizer: Any
    longest: int

    def __post_init__(self) -> None:
        self._histories: list[list[dict[str, str]]] = [[] for _ in self.conversations]

    def turn(self, number: int) -> list[TokenRequest]:
        requests = []
        for index, chat in enumerate(self.conversations):
            history = self._histories[index]
            history.append({"role": "user", "content": chat.turns[number]})
            wanted = chat.max_tokens[number]
            ids = self._ids(chat, history)
            while len(ids) + wanted > self.longest and len(history) > 1:
                del history[:2]
                ids = self._ids(chat, history)
            requests.append(TokenRequest(f"{chat.name}-turn-{number}", ids, wanted))
        return requests

    def answered(self, index: int, output_ids: list[int]) -> None:
        text = self.tokenizer.decode(output_ids, skip_special_tokens=True)
        self._histories[index].append({"role": "assistant", "content": text})

    def _ids(self, chat: Chat, history: list[dict[str, str]]) -> list[int]:
        messages = [{"role": "system", "content": chat.system}, *history]
        return list(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
