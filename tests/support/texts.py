"""Tokenizers of one token per character."""

TOKENS = ("<bos>", "<eos>", "<unk>", "<turn>", *"abcdefghijklmnopqrstuvwxyz .,:")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def save_tokenizer(folder, template, *, tokens=TOKENS, single="<bos> $A", eos_token="<eos>"):
    """One token per character; the backend puts a text in `single`, with a BOS, and the template has one too."""
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
        eos_token=eos_token,
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def ids(text, tokens=TOKENS):
    """Ids of a text with specials written out."""
    found = []
    while text:
        token = next((t for t in TOKENS[:4] if text.startswith(t)), text[0])
        found.append(tokens.index(token))
        text = text[len(token) :]
    return found


class Letters:
    """A tokenizer of one id per letter."""

    stop_ids = frozenset({7})

    def encode(self, row):
        return [ord(letter) for letter in row.prompt]

    def encode_all(self, rows):
        return [self.encode(row) for row in rows]
