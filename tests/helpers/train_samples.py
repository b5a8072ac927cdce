"""For tests of a training run's data: configs, a small tokenizer and its chat templates."""

import itertools

from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data import open_data, prepare

TURN = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
CHAT = (
    "{% for message in messages %}" + TURN + "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# the same text, with the answers marked
MARKED = (
    "{% for message in messages %}" + TURN + "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_tokenizer(folder, template=CHAT, vocabulary=400, trims=False):
    """A byte-level BPE tokenizer that begins texts with <s>; returns it. `trims`: blanks, where it tells places."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["the answer is that a document has some words, user, assistant"] * 4, trainer)
    made.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=trims),
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
    ])  # fmt: skip
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template)
    found.save_pretrained(folder)
    return found


def run_of(folder, *, mesh=None, train=None, evaluation=None, model="tiny-qwen3", **data):
    """A training file with some data."""
    tables = {
        "model": {"path": str(model), "weights": "random"},
        "mesh": mesh or {},
        "data": data,
        "train": {"output": str(folder / "out"), **(train or {})},
    }
    return RunConfig.model_validate(tables | ({"evaluation": evaluation} if evaluation else {}))


def opened(config, pipeline=0):
    """Data of a run, prepared in this process."""
    prepare(config, lambda text: None)
    return open_data(config, pipeline=pipeline)


def samples_of(batch):
    """(ids, labels) of every sample of a batch, as lists."""
    found = []
    for microbatch in batch.microbatches:
        ids, labels = microbatch["input_ids"], microbatch["labels"]
        if "cu_seqlens" in microbatch:
            borders = microbatch["cu_seqlens"].tolist()
            parts = [(ids.flatten()[a:b], labels.flatten()[a:b]) for a, b in itertools.pairwise(borders)]
        else:
            mask = microbatch.get("attention_mask", ids.new_ones(ids.shape)).bool()
            parts = [(ids[row][mask[row]], labels[row][mask[row]]) for row in range(len(ids))]
        found += [(one.tolist(), other.tolist()) for one, other in parts if (other != -100).any()]
    return found


def all_samples(data):
    """Samples of all batches until the end, in the order of their ids."""
    found = []
    while data.steps_left:
        found += samples_of(data.next())
    return sorted(found)
