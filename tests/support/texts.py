"""Tokenizers with one token per character, or per byte with small chat templates."""

import re

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.prompts import PromptStream
from minirl.data.task import Row

TOKENS = ("<bos>", "<eos>", "<unk>", "<turn>", *"abcdefghijklmnopqrstuvwxyz .,:")


# A template comment that marks Hermes-style tool calls.
HERMES = '{# <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> #}'


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def save_tokenizer(folder, template, *, tokens=TOKENS, single="<bos> $A"):
    """Save a tokenizer with one token per character; both the backend (`single`) and the template add a BOS."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    special_tokens = [(token, tokens.index(token)) for token in ("<bos>", "<eos>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def ids(text, tokens=TOKENS):
    """Return the ids of a text with written-out special tokens."""
    found = []
    while text:
        token = next((t for t in TOKENS[:4] if text.startswith(t)), text[0])
        found.append(tokens.index(token))
        text = text[len(token) :]
    return found


def user(content):
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content, **fields):
    """Return an assistant message with additional fields."""
    return {"role": "assistant", "content": content, **fields}


class Letters(ChatTokenizer):
    """A tokenizer with one id per letter."""

    chat = False
    tools = ()
    stop_ids = frozenset({7})

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.bos_ids = self.eos_ids = []

    def backend(self, texts, add_special_tokens):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def letter_prompts(texts, *, tokenizer=None, vocab_size=128, **options):
    """Return a prompt stream with one token per letter, or with the given tokenizer; row i has the origin f:i."""
    rows = [Row(text, {}, f"f:{i}") for i, text in enumerate(texts, 1)]
    defaults = dict(purpose="train", max_tokens=10, max_new_tokens=4)
    return PromptStream(rows, tokenizer or Letters(vocab_size), **defaults | options)


# Small templates, each with a quirk of published templates, and the token that ends an answer.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML
CHAT_TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "content stripped, tools as json": (
        "<s>{% for m in messages %}<|start|>{{ m.role }}\n\n"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}",
        "<|eot|>",
    ),
    "an answer is not closed": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|user|>",
    ),
    "eos ends the conversation": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}",
        "<|end|>",
    ),
    "two closing tokens": (
        CHATML.replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' %}<|open|>{{ m.content }}<|close|>{% else %}{{ m.content }}{% endif %}",
        ).replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<|open|>{% endif"),
        "<|im_end|>",
    ),
    "thoughts are left out later": (
        CHATML.replace(
            "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        ).replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
        "<|im_end|>",
    ),
}


def save_chat_tokenizer(folder, template, end, special=()):
    """Save a tokenizer with one id per byte and per special token of the template and `special`; `end` is its EOS."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    backend = Backend(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    templates = f"{template}<|user|><|tool|><|assistant|><|eot|></s>"
    tokens = {*special, *re.findall(r"<\|\w+\|>|</?s>", templates)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token=end,
        additional_special_tokens=sorted(tokens - {end}),
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
