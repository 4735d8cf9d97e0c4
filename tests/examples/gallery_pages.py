"""What the pages of the gallery state beyond the numbers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.examples.gallery_panels import Bars, Confusion, Curves, Forecast, Panel, Picture, Plane


@dataclass(frozen=True)
class Example:
    """An example and its page.

    Attributes:
        name: The script in examples/gallery.
        title: The heading of the page.
        summary: The text of its card in the index.
        text: The introduction of the page.
        described: What the picture shows, for those who do not see it.
        panels: The parts of the picture; `card` is the number of the one on the card in the index.
        numbers: Labels, names and formats of the results in the page's table.
        uses: What of drivetrain it uses, with links.
        following: Links to read next.
        learned: A result, and the bound of chance or of an untrained model that a small run passes.
        falls: A loss that falls in a small run, as `run:metric`.
        small: What `--small` does.
        report: The run whose report the page links to.
        size: Inches of the picture.
        stacked: Whether its parts are one below the other.
    """

    name: str
    title: str
    summary: str
    text: str
    described: str
    panels: Sequence[Panel]
    numbers: Sequence[tuple[str, str, str]]
    uses: Sequence[str]
    following: Sequence[str]
    learned: tuple[str, str, float] | None
    falls: str = "run:train_loss"
    small: str = "a few steps"
    report: str = "run"
    card: int = 0
    size: tuple[float, float] = (8.4, 3.2)
    stacked: bool = False


SAVING = (
    "[`ModelCheckpoint`](../callbacks.md#modelcheckpoint): the best model by a validation metric, for test and predict"
)
STOPPING = "[`EarlyStopping`](../callbacks.md#earlystopping): training ends where validation no longer improves"
RATES = "[`LearningRateMonitor`](../callbacks.md#learningratemonitor-and-modelsummary): the schedule as a curve"
METRICS = (
    "[torchmetrics](../trainer.md#logging), logged as objects: each sample counts once, on any number of processes"
)
SEEDED = (
    "[a random state for each sample](../data.md#randomness-belongs-to-the-sample): with `Trainer(seed=0)` random data "
    "repeat on any number of processes"
)
BY_HAND = "[optimization by hand](../trainer.md#by-hand): `toggle_model`, `manual_backward`, two optimizers"
PREDICTING = '[`trainer.predict`](../trainer.md) with the best checkpoint (`ckpt_path="best"`)'

EXAMPLES = [
    Example(
        name="classification",
        title="Image classification with augmentation",
        summary="A convolutional network on scanned digits, rotated, scaled and shifted at random.",
        text="""
A convolutional network classifies scikit-learn's 1797 scanned digits of 8x8 pixels. Each training image is rotated,
scaled and shifted at random in every epoch; a one-cycle schedule covers the whole run. The checkpoint with the best
validation accuracy is tested, and its confusion matrix counted.
""",
        described="Loss and accuracy of training and validation, and the confusion matrix of the test",
        panels=(
            Curves("Loss", {"train_loss": "training, augmented", "val_loss": "validation"}, log=True),
            Curves("Accuracy", {"train_accuracy": "training, augmented", "val_accuracy": "validation"}, percent=True),
            Confusion("Test", width=0.9),
        ),
        numbers=(("test accuracy", "test_accuracy", ".1%"), ("epochs", "epochs", ".0f")),
        uses=(METRICS, SAVING, STOPPING, RATES, SEEDED, PREDICTING),
        following=(
            "[Contrastive learning](contrastive.md): the same images without labels",
            "[Distillation](distillation.md): a smaller network from a larger one",
            "[Data loading](../data.md): workers, order, random state",
        ),
        learned=("test_accuracy", "above", 0.4),
        small="two epochs",
        card=2,
        size=(10.5, 3.2),
    ),
    Example(
        name="segmentation",
        title="Semantic segmentation with a U-Net",
        summary="The class of each pixel: scanned digits, pasted on photographs.",
        text="""
A small U-Net assigns each pixel of a photograph to the background or to one of ten digits. The canvases are pieces of
the two photographs that come with scikit-learn, with two of its scanned digits pasted on each; those to train on are
composed again in every epoch, from other digits than those of validation and test. The metric is the mean
intersection over union of all 11 classes.
""",
        described="Canvases, the classes of their pixels and those found, above the curves of loss and overlap",
        panels=(
            Picture("Test canvases, the classes of their pixels, and those found", "canvases.png", width=1.15),
            Curves(
                "Training and validation",
                {"train_loss": "training loss", "val_loss": "validation loss", "val_iou": "validation IoU"},
            ),
        ),
        numbers=(("test, mean intersection over union", "test_iou", ".3f"), ("test, loss", "test_loss", ".3f")),
        uses=(METRICS, SAVING, STOPPING, RATES, SEEDED, PREDICTING),
        following=(
            "[Detection](detection.md): boxes rather than pixels",
            "[Mixed precision](../precision.md): half the memory for larger canvases",
        ),
        learned=None,
        small="two short epochs",
        size=(8.4, 6.0),
        stacked=True,
    ),
    Example(
        name="detection",
        title="Detection: class and box from one network",
        summary="Multi-task learning: which digit is on a photograph, and where.",
        text="""
One network has two heads: one names the digit on a photograph, the other finds the box around it. Both losses are
logged, and their weighted sum is minimised. The canvases are pieces of the two photographs that come with
scikit-learn, with one of its scanned digits pasted on each, 10 to 18 pixels wide. Boxes are measured by their
intersection over union (IoU) with the true ones.
""",
        described="Canvases with the true boxes and those found, above the curves of the losses and of the metrics",
        panels=(
            Picture("Test canvases: the true boxes in white, those found in red", "canvases.png", width=0.55),
            Curves("Losses", {"digit_loss": "digit", "box_loss": "box", "train_loss": "weighted sum"}, log=True),
            Curves("Validation", {"val_accuracy": "accuracy of the digit", "val_iou": "IoU of the box"}),
        ),
        numbers=(("test, accuracy of the digit", "test_accuracy", ".1%"), ("test, IoU of the box", "test_iou", ".3f")),
        uses=(METRICS, SAVING, STOPPING, RATES, SEEDED, PREDICTING),
        following=(
            "[Segmentation](segmentation.md): pixels rather than boxes",
            "[A loss for each optimizer](../trainer.md#a-loss-for-each-optimizer): where heads are trained apart",
        ),
        learned=("test_iou", "above", 0.4),
        small="three short epochs",
        card=2,
        size=(8.4, 7.0),
        stacked=True,
    ),
    Example(
        name="finetuning",
        title="Fine-tuning a small transformer",
        summary="Pre-trained on source code, fine-tuned on few labels, frozen at first.",
        text="""
A causal transformer of 170,000 parameters learns to predict the next character of the standard library's top modules.
Fine-tuning then has 60 snippets of 96 characters of each of four packages (`asyncio`, `email`, `unittest`, `xml`) and
learns which package a snippet is of. For three epochs only the new head is trained; then `BackboneFinetuning`
unfreezes the transformer, at a fifth of the learning rate. The same network without pre-training is the reference.
Half a minute of pre-training is little: with 400 test snippets, accuracies that differ by less than five points are
equal within the error. Both read the sources of the Python that runs them, so other versions give other numbers.
""",
        described="The loss of pre-training, validation accuracies with and without it, and the test accuracies",
        panels=(
            Curves("Pre-training", {"pretraining:pretraining_loss": "loss of the next character"}),
            Curves(
                "Validation accuracy",
                {"finetuned:val_accuracy": "fine-tuned", "from_scratch:val_accuracy": "from scratch"},
                percent=True,
            ),
            Bars("Test accuracy", {"finetuned": "fine-tuned", "from_scratch": "from scratch"}, percent=True),
        ),
        numbers=(
            ("test accuracy, fine-tuned", "finetuned", ".1%"),
            ("test accuracy, from scratch", "from_scratch", ".1%"),
            ("chance", "chance", ".1%"),
        ),
        uses=(
            "[`BackboneFinetuning`](../callbacks.md#backbonefinetuning-and-basefinetuning): frozen until an epoch",
            METRICS,
            SAVING,
            RATES,
        ),
        following=(
            "[A small GPT under every strategy](../examples.md#one-task-under-every-strategy)",
            "[Big models](../big-models.md): QLoRA, quantisation, weights on disk",
        ),
        learned=None,
        falls="pretraining:pretraining_loss",
        small="ten steps, then one of each",
        report="finetuned",
        card=1,
        size=(10.5, 3.2),
    ),
    Example(
        name="gan",
        title="A conditional GAN, optimized by hand",
        summary="Two networks, two optimizers, and a generator that draws the digit that is asked for.",
        text="""
A generator learns to draw scanned digits, and a discriminator to distinguish them from scikit-learn's 1797 real ones;
both are given the digit that is asked for. The task optimizes by hand and steps the two optimizers in turn. Losses of
a GAN do not show how good it is, so a classifier by nearest neighbours, fitted to real digits only, reads 500 drawn
ones after each epoch: the metric is the share that it reads as the digit asked for.
""",
        described="Rows of drawn digits, the losses of both networks, and the share read as the digit asked for",
        panels=(
            Picture("Drawn digits, a row for each", "samples.png", width=1.2),
            Curves("Losses", {"loss_d": "discriminator", "loss_g": "generator"}),
            Curves("Read as the digit asked for", {"read_as_asked": "500 drawn digits"}, percent=True),
        ),
        numbers=(("drawn digits read as the digit asked for", "read_as_asked", ".1%"),),
        uses=(BY_HAND, "[logging at the end of an epoch](../trainer.md#logging), in a hook"),
        following=(
            "[Diffusion](diffusion.md): the same digits, in a loop of your own",
            "`examples/gan.py`: the same on points in the plane, as a task and in a raw loop",
        ),
        learned=("read_as_asked", "above", 0.2),
        falls="",
        small="eight epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="diffusion",
        title="Diffusion in a loop of your own",
        summary="The Accelerator, an average of the weights, and guided samples of each digit.",
        text="""
A network learns to remove noise from scikit-learn's 1797 scanned digits, and draws new ones from pure noise in 100
steps. The loop is written by hand around the [Accelerator](../accelerator.md): four lines differ from plain PyTorch,
and it runs on several processes as it is. Samples come from an exponential average of the weights, guided by the
digit that is asked for. A classifier by nearest neighbours, fitted to real digits only, reads 300 of them.
""",
        described="Rows of drawn digits, the loss, and the share read as the digit asked for",
        panels=(
            Picture("Drawn digits, a row for each", "samples.png", width=1.2),
            Curves("Loss", {"loss": "error of the estimated noise"}),
            Curves("Read as the digit asked for", {"read_as_asked": "300 drawn digits"}, percent=True),
        ),
        numbers=(
            ("drawn digits read as the digit asked for", "read_as_asked", ".1%"),
            ("loss of the last epoch", "loss", ".3f"),
        ),
        uses=(
            "[`Accelerator.prepare` and `backward`](../accelerator.md#four-lines)",
            "[a prepared schedule](../accelerator.md#schedulers), and `clip_grad_norm_`",
            "[`register_for_checkpointing`](../accelerator.md#saving-and-resuming): the average is saved too",
            "[trackers in a raw loop](../trackers.md#in-a-raw-loop), and `drivetrain report` for the page of the run",
        ),
        following=(
            "[A conditional GAN](gan.md): the same digits by two networks",
            "[`EMAWeightAveraging`](../callbacks.md#weightaveraging): the same average with the Trainer",
        ),
        learned=("read_as_asked", "above", 0.2),
        falls="run:loss",
        small="ten epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="contrastive",
        title="Contrastive learning without labels",
        summary="SimCLR on scanned digits, measured by a linear classifier with 50 labels.",
        text="""
SimCLR learns representations of scikit-learn's scanned digits without any label: two random views of one image are to
be similar, views of different images are not. A linear classifier with five labelled images of each digit then
measures what the representations hold, beside the same on raw pixels and on an untrained network.
""",
        described="The contrastive loss, test images in a plane, and accuracies with 50 labels",
        panels=(
            Curves("Contrastive loss", {"train_loss": "training", "val_loss": "validation"}),
            Plane("Test images, two principal components", "plane", "digits", width=1.1),
            Bars(
                "Linear classifier with 50 labels",
                {"probe_pixels": "pixels", "probe_untrained": "untrained", "probe_trained": "SimCLR"},
                xlabel="test accuracy",
                percent=True,
            ),
        ),
        numbers=(
            ("test accuracy with 50 labels, on SimCLR's representations", "probe_trained", ".1%"),
            ("on raw pixels", "probe_pixels", ".1%"),
            ("on an untrained network's", "probe_untrained", ".1%"),
        ),
        uses=(SEEDED, SAVING, RATES, "[`trainer.predict`](../trainer.md) for the representations of all images"),
        following=(
            "[Image classification](classification.md): with all labels",
            "[Fine-tuning](finetuning.md): a pre-trained network on few labels",
        ),
        learned=("probe_trained", "above", 0.5),
        small="two epochs",
        card=1,
        size=(10.5, 3.2),
    ),
    Example(
        name="tabular",
        title="Tabular data with a data module",
        summary="Breast tumours by 30 measurements: scaling, metrics, importance of columns.",
        text="""
A residual network classifies scikit-learn's 569 breast tumours by 30 measurements. A `DataModule` splits the table,
scales its columns by the training part, and makes the loaders. On tables of this size a simple model is hard to beat:
a logistic regression on the same columns is the reference. The importance of a column is what test accuracy loses
when its values are permuted.
""",
        described="Losses, AUROC and accuracy of validation, and the importance of eight columns",
        panels=(
            Curves("Loss", {"train_loss": "training", "val_loss": "validation"}, log=True),
            Curves("Validation", {"val_accuracy": "accuracy", "val_auroc": "AUROC", "val_recall": "recall"}),
            Bars("Accuracy lost when permuted", "importances", percent=True, width=1.1),
        ),
        numbers=(
            ("test accuracy", "test_accuracy", ".1%"),
            ("test AUROC", "test_auroc", ".4f"),
            ("malignant tumours found (recall)", "test_recall", ".1%"),
            ("test accuracy of a logistic regression", "logistic_regression", ".1%"),
        ),
        uses=(
            "[`DataModule`](../trainer.md): splits and loaders in one class, with any task",
            "[a collection of metrics](../trainer.md#logging), with `log_dict`",
            SAVING,
            STOPPING,
            "[`ReduceLROnPlateau`](../trainer.md#optimizers-and-schedulers) with its `monitor`",
            "[`load_from_checkpoint`](../trainer.md#what-a-task-defines): the best model, outside the Trainer",
        ),
        following=(
            "[Cross-validation](kfold.md): where a single split is too small",
            "[Tuning](../tuning.md): learning rate and batch size",
        ),
        learned=("test_accuracy", "above", 0.75),
        small="five epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="forecasting",
        title="Forecasting with quantiles",
        summary="A recorded nerve cell, 16 milliseconds ahead, with an interval and its coverage.",
        text="""
The series is `membrane.dat`, which comes with matplotlib: the potential of a nerve cell's membrane, one sample every
half millisecond, of which the 9,900 are used during which the cell was stimulated. From 64 milliseconds a network of
dilated convolutions forecasts the next 16: for each sample the 10 %, 50 % and 90 % quantiles, by the pinball loss.
The first 70 % of the series are to train on, the last 15 % to test. The references are the last value, repeated, and
a linear regression from all 128 samples. An interval of 10 % to 90 % should cover 80 % of what comes; the cell fires
regularly at first and irregularly later, so an interval learned on the first part need not hold in the last, and the
coverage shows by how much.
""",
        described="Two test windows with their forecast, and the curves of the pinball loss",
        panels=(
            Forecast("A test window", 0),
            Forecast("A later one", 1),
            Curves("Pinball loss", {"train_loss": "training", "val_loss": "validation"}),
        ),
        numbers=(
            ("test, mean absolute error of the median, in deviations", "test_error", ".3f"),
            ("of the last value", "error_of_last_value", ".3f"),
            ("of a linear regression", "error_of_linear_regression", ".3f"),
            ("test, share within the interval of 80 %", "test_covered", ".1%"),
        ),
        uses=(METRICS, SAVING, STOPPING, RATES, PREDICTING),
        following=(
            "[Data loading](../data.md): series too long for memory",
            "[Predictions in files](../callbacks.md#predictionwriter-and-basepredictionwriter)",
        ),
        learned=None,
        small="two short epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="reinforcement",
        title="Reinforcement learning with PPO",
        summary="A policy balances a pole on a cart; rollouts are an iterable dataset.",
        text="""
A policy learns to balance a pole on a cart by pushing left or right. The cart is simulated in the script: **these
data are made, none are real**. An iterable dataset lets the policy act in 16 environments at once and yields what
they went through; each epoch is one such rollout, and four passes of proximal policy optimization over it. An episode
ends when the pole falls, or after 500 steps.
""",
        described="The mean length of the latest episodes, and the losses of policy and value",
        panels=(
            Curves("Mean length of the latest 32 episodes", {"episode_length": "steps until the pole falls"}),
            Curves("Value loss and entropy", {"value_loss_epoch": "value loss", "entropy_epoch": "entropy"}, log=True),
        ),
        numbers=(
            ("mean length of 100 episodes after training", "episode_length", ".0f"),
            ("before training", "untrained_episode_length", ".0f"),
            ("episodes seen", "episodes", ".0f"),
        ),
        uses=(
            "[an iterable dataset](../data.md) that reads the task as it is trained",
            "[logging by step and by epoch](../trainer.md#logging) at once",
            "[`gradient_clip_val`](../trainer.md)",
            "[`EarlyStopping`](../callbacks.md#earlystopping) with a `stopping_threshold`",
            SAVING,
        ),
        following=(
            "[Optimization by hand](../trainer.md#by-hand): for algorithms with several updates in a step",
            "[Your own callback](../extending.md): to record episodes as they end",
        ),
        learned=("episode_length", "above", 40.0),
        falls="",
        small="six rollouts",
    ),
    Example(
        name="kfold",
        title="k-fold cross-validation",
        summary="Five models, each tested on wines that it has not seen, and how much accuracies differ.",
        text="""
Five networks classify scikit-learn's 178 wines of three cultivars by 13 measurements: each is trained on four fifths
of the wines and predicts the rest, so that every wine is predicted once, by a model that has not seen it. Each fold
has a Trainer, a seed and a folder of its own. Since early stopping watches the held-out fold, the figures are a
little better than on further data.
""",
        described="Validation losses of the five folds, and their accuracies",
        panels=(
            Curves(
                "Validation loss",
                {f"folds/fold_{fold}:val_loss": f"fold {fold + 1}" for fold in range(5)},
                log=True,
            ),
            Bars("Accuracy of each fold", "folds", percent=True, start=0.8),
        ),
        numbers=(
            ("accuracy over all wines, each predicted once", "accuracy", ".1%"),
            ("mean of the folds", "mean_of_folds", ".1%"),
            ("deviation of the folds", "deviation_of_folds", ".1%"),
        ),
        uses=(
            "a `Trainer` for each fold, with a seed and a `version` of its logger each",
            SAVING,
            STOPPING,
            PREDICTING,
            "[`drivetrain report`](../run-report.md#pages-made-later-and-comparisons) compares the folds on one page",
        ),
        following=(
            "`examples/by_feature/cross_validation.py`: folds in a raw loop, on several processes",
            "[Tabular data](tabular.md): a data module, and one split",
        ),
        learned=("accuracy", "above", 0.6),
        falls="folds/fold_0:train_loss",
        small="four epochs a fold",
        report="folds/fold_0",
        card=1,
    ),
    Example(
        name="distillation",
        title="Knowledge distillation",
        summary="A small network learns from a larger one what 100 labels alone do not teach it.",
        text="""
A convolutional teacher of 31,000 parameters is trained on 100 labelled digits of scikit-learn, shifted at random. A
student of 1,510 parameters is trained twice from the same first weights: on these labels alone, and on the softened
outputs of the teacher for all 1257 training images, without a label. The three are separate runs with a folder each.
""",
        described="Validation accuracies of teacher and students, and their test accuracies",
        panels=(
            Curves(
                "Validation accuracy",
                {
                    "teacher:val_accuracy": "teacher",
                    "student:val_accuracy": "student, distilled",
                    "student_alone:val_accuracy": "student, labels alone",
                },
                percent=True,
            ),
            Bars(
                "Test accuracy",
                {"teacher": "teacher", "student": "student,\ndistilled", "student_alone": "student,\nlabels alone"},
                percent=True,
            ),
        ),
        numbers=(
            ("test accuracy of the teacher", "teacher", ".1%"),
            ("of the student, distilled", "student", ".1%"),
            ("of the student, on labels alone", "student_alone", ".1%"),
        ),
        uses=(
            "a frozen network that is not part of the task: it is neither trained nor saved",
            "[`val_check_interval` over epochs](../trainer.md) with `check_val_every_n_epoch=None`",
            METRICS,
            SAVING,
            RATES,
        ),
        following=(
            "[Contrastive learning](contrastive.md): the same images without any label",
            "[Plain weights](../checkpoints.md#plain-weights): the student for use elsewhere",
        ),
        learned=("teacher", "above", 0.5),
        falls="teacher:train_loss",
        small="40 steps each",
        report="student",
        card=1,
    ),
]

# Examples with pages of their own elsewhere: title, address, picture, its description, text of the card.
OTHERS = [
    (
        "A small GPT under every strategy",
        "../examples.md#one-task-under-every-strategy",
        "../images/char_lm_curves.png",
        "The losses of six strategies on one curve",
        "One task on one process, DDP, FSDP, tensor parallelism, a pipeline and DeepSpeed: the same losses.",
    ),
]
