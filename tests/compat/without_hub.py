"""What scripts read from the hub, made in place: a paraphrase task, its metric, and a model that has learned it."""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Put the data, the metric and the model in the place of those that are downloaded."""
    import datasets
    import evaluate
    import transformers

    datasets.load_dataset = task
    evaluate.load = Metric
    folder = f"{os.environ['COMPAT_FOLDER']}/model{os.environ.get('RANK', '0')}"
    if not os.path.exists(folder):
        save_trained(folder)
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForSequenceClassification):
        read = kind.from_pretrained
        kind.from_pretrained = lambda name, *given, read=read, **options: read(folder, *given, **options)
    sys.argv += ["--model_name_or_path", folder]


def rows(first: int, last: int) -> dict[str, list]:
    """Pairs of sentences; the first noun of the pair decides the label."""
    from tests.compat.programs.made_here import words

    texts = words(last)[first:]
    labels = [int(text.split()[1] in ("cat", "dog", "bird", "fish")) for text in texts]
    return {"sentence1": texts, "sentence2": texts, "label": labels, "idx": list(range(len(texts)))}


def task(*names: str, split: str | None = None):
    """The task, as `datasets.load_dataset` returns it."""
    from datasets import Dataset, DatasetDict

    parts = DatasetDict(train=Dataset.from_dict(rows(0, 64)), validation=Dataset.from_dict(rows(64, 103)))
    return parts if split is None else parts[split]


class Metric:
    """Accuracy and F1, as the metric of GLUE computes them."""

    def __init__(self, *names: str) -> None:
        self.predictions, self.references = [], []

    def add_batch(self, predictions, references) -> None:
        self.predictions += predictions.tolist()
        self.references += references.tolist()

    def compute(self) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        found = self.references, self.predictions
        self.predictions, self.references = [], []
        return {"accuracy": accuracy_score(*found), "f1": f1_score(*found)}


def save_trained(folder: str) -> None:
    """Write a model that has learned the task."""
    import torch

    from tests.compat.programs.made_here import classifier, tokenizer

    encode, model = tokenizer(), classifier(positions=128)
    read = rows(0, 64)
    batch = encode(read["sentence1"], read["sentence2"], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(25):
        model(**batch, labels=torch.tensor(read["label"])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    encode.save_pretrained(folder)
