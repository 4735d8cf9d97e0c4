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


SAVING = "[`ModelCheckpoint`](../callbacks.md#modelcheckpoint): keeps the best model by a validation metric"
STOPPING = "[`EarlyStopping`](../callbacks.md#earlystopping): stops when validation no longer improves"
RATES = "[`LearningRateMonitor`](../callbacks.md#learningratemonitor-and-modelsummary): logs the learning rate"
METRICS = (
    "[torchmetrics](../trainer.md#logging), logged as objects, which count each sample once on any number of processes"
)
SEEDED = (
    "[a random state for each sample](../data.md#randomness-belongs-to-the-sample): `Trainer(seed=0)` makes "
    "augmentation repeatable on any number of processes"
)
BY_HAND = "[manual optimization](../trainer.md#by-hand): `toggle_model`, `manual_backward`, two optimizers"
PREDICTING = '[`trainer.predict`](../trainer.md) with the best checkpoint (`ckpt_path="best"`)'

EXAMPLES = [
    Example(
        name="classification",
        title="Image classification with augmentation",
        summary="A convolutional network on scanned digits, rotated, scaled and shifted at random.",
        text="""
Train a convolutional network on scikit-learn's 1797 scanned digits of 8x8 pixels. Each training image is randomly
rotated, scaled and shifted in every epoch, and the learning rate follows a one-cycle schedule. The checkpoint with the
best validation accuracy is tested, with a confusion matrix.
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
        summary="Classify each pixel of photographs with scanned digits pasted on them.",
        text="""
Assign each pixel of an image to the background or to one of ten digits, with a small U-Net. The images are pieces of
the two photographs in scikit-learn, with two of its scanned digits pasted on each. Training images are composed anew
in every epoch, from other digits than those for validation and test. The metric is the mean intersection over union
(IoU) of all 11 classes.
""",
        described="Images, true and predicted classes of their pixels, and curves of the loss and the IoU",
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
            "[Detection](detection.md): boxes instead of pixels",
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
        summary="Multi-task learning: the class and the position of a digit in a photograph.",
        text="""
Predict the class and the bounding box of an object with one network that has two heads. Both losses are logged, and
their weighted sum is minimized. The images are pieces of the two photographs in scikit-learn, with one of its scanned
digits pasted on each, 10 to 18 pixels wide. The metric for boxes is their intersection over union (IoU) with the true
ones.
""",
        described="Images with true and predicted boxes, and curves of the losses and the metrics",
        panels=(
            Picture("Test canvases: the true boxes in white, those found in red", "canvases.png", width=0.55),
            Curves("Losses", {"digit_loss": "digit", "box_loss": "box", "train_loss": "weighted sum"}, log=True),
            Curves("Validation", {"val_accuracy": "accuracy of the digit", "val_iou": "IoU of the box"}),
        ),
        numbers=(("test, accuracy of the digit", "test_accuracy", ".1%"), ("test, IoU of the box", "test_iou", ".3f")),
        uses=(METRICS, SAVING, STOPPING, RATES, SEEDED, PREDICTING),
        following=(
            "[Segmentation](segmentation.md): pixels instead of boxes",
            "[A loss for each optimizer](../trainer.md#a-loss-for-each-optimizer): to train heads separately",
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
        summary="Pre-train on source code, then fine-tune on few labels, first with frozen layers.",
        text="""
Pre-train a transformer, then fine-tune it on few labels. A causal transformer of 170,000 parameters first learns to
predict the next character of Python's standard library. Then it learns to classify the package of a snippet
(`asyncio`, `email`, `unittest`, `xml`), from 60 snippets per package. For three epochs, only the new head is trained.
`BackboneFinetuning` then unfreezes the transformer, at a fifth of the learning rate. The baseline is the same network
without pre-training. With 400 test snippets, differences below five percentage points are within the error.
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
            "[`BackboneFinetuning`](../callbacks.md#backbonefinetuning-and-basefinetuning): unfreezes layers later",
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
        title="A conditional GAN with manual optimization",
        summary="Two networks, two optimizers, and a generator of digits of a requested class.",
        text="""
Train two networks with two optimizers, in manual optimization. The generator learns to draw scanned digits of a
requested class, and the discriminator to distinguish them from scikit-learn's 1797 real ones. Losses of a GAN do not
show its quality. After each epoch, a nearest-neighbour classifier trained on real digits therefore classifies 500
generated ones. The metric is the share that it assigns to the requested class.
""",
        described="Generated digits, the losses of both networks, and the share classified as requested",
        panels=(
            Picture("Drawn digits, a row for each", "samples.png", width=1.2),
            Curves("Losses", {"loss_d": "discriminator", "loss_g": "generator"}),
            Curves("Read as the digit asked for", {"read_as_asked": "500 drawn digits"}, percent=True),
        ),
        numbers=(("generated digits classified as requested", "read_as_asked", ".1%"),),
        uses=(BY_HAND, "[logging at the end of an epoch](../trainer.md#logging), in a hook"),
        following=(
            "[Diffusion](diffusion.md): the same digits, in your own loop",
            "`examples/gan.py`: points in the plane, as a task and in your own loop",
        ),
        learned=("read_as_asked", "above", 0.2),
        falls="",
        small="eight epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="diffusion",
        title="Diffusion in your own training loop",
        summary="The Accelerator, averaged weights, and guided samples of each digit.",
        text="""
Train a diffusion model in your own loop with the [Accelerator](../accelerator.md). Four lines differ from plain
PyTorch, and the script runs on several processes. The network learns to remove noise from scikit-learn's 1797 scanned
digits, and generates new ones from noise in 100 steps. Samples use an exponential moving average of the weights, with
guidance by the requested class. A nearest-neighbour classifier trained on real digits classifies 300 of them.
""",
        described="Rows of generated digits, the loss, and the share classified as requested",
        panels=(
            Picture("Drawn digits, a row for each", "samples.png", width=1.2),
            Curves("Loss", {"loss": "error of the estimated noise"}),
            Curves("Read as the digit asked for", {"read_as_asked": "300 drawn digits"}, percent=True),
        ),
        numbers=(
            ("generated digits classified as requested", "read_as_asked", ".1%"),
            ("loss of the last epoch", "loss", ".3f"),
        ),
        uses=(
            "[`Accelerator.prepare` and `backward`](../accelerator.md#four-lines)",
            "[a prepared schedule](../accelerator.md#schedulers), and `clip_grad_norm_`",
            "[`register_for_checkpointing`](../accelerator.md#saving-and-resuming): also saves the average",
            "[trackers in your own loop](../trackers.md#in-your-own-loop), and `drivetrain report` for the report",
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
Learn representations of images without labels. SimCLR makes the representations of two random views of an image
similar, and those of different images dissimilar. A linear classifier trained on five labelled images per digit then
measures their quality. The baselines are the same classifier on raw pixels and on an untrained network.
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
        summary="Classify breast tumours by 30 measurements: scaling, metrics, feature importance.",
        text="""
Classify rows of a table: scikit-learn's 569 breast tumours with 30 measurements each, with a residual network. A
`DataModule` splits the table, scales its columns by the training set, and creates the loaders. On small tables,
simple models are hard to beat, so a logistic regression on the same columns is the baseline. The importance of a
column is the test accuracy lost when its values are permuted.
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
            ("recall of malignant tumours", "test_recall", ".1%"),
            ("test accuracy of a logistic regression", "logistic_regression", ".1%"),
        ),
        uses=(
            "[`DataModule`](../trainer.md): splits and loaders in one class, with any task",
            "[a collection of metrics](../trainer.md#logging), with `log_dict`",
            SAVING,
            STOPPING,
            "[`ReduceLROnPlateau`](../trainer.md#optimizers-and-schedulers) with its `monitor`",
            "[`load_from_checkpoint`](../trainer.md#what-a-task-defines): use the best model without Trainer",
        ),
        following=(
            "[Cross-validation](kfold.md): if a single split is too small",
            "[Tuning](../tuning.md): learning rate and batch size",
        ),
        learned=("test_accuracy", "above", 0.75),
        small="five epochs",
        size=(10.5, 3.2),
    ),
    Example(
        name="forecasting",
        title="Forecasting with quantiles",
        summary="Forecast a nerve cell's potential for 16 milliseconds, with prediction intervals.",
        text="""
Forecast a time series with prediction intervals. The series is `membrane.dat` from matplotlib: the membrane potential
of a nerve cell during stimulation, 9,900 samples at intervals of half a millisecond. From 64 milliseconds, a network of
dilated convolutions forecasts the next 16. It predicts the 10 %, 50 % and 90 % quantiles of each sample, with the
pinball loss. The baselines repeat the last value, or use a linear regression. The interval from 10 % to 90 % should
cover 80 % of the values. At the end of the series, the cell fires irregularly, so the real coverage is lower.
""",
        described="Two test windows with their forecast, and the curves of the pinball loss",
        panels=(
            Forecast("A test window", 0),
            Forecast("A later one", 1),
            Curves("Pinball loss", {"train_loss": "training", "val_loss": "validation"}),
        ),
        numbers=(
            ("test, mean absolute error of the median, in standard deviations", "test_error", ".3f"),
            ("of the last value", "error_of_last_value", ".3f"),
            ("of a linear regression", "error_of_linear_regression", ".3f"),
            ("test, share within the 80 % interval", "test_covered", ".1%"),
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
        summary="A policy balances a pole on a cart. Rollouts are an iterable dataset.",
        text="""
Train a policy with proximal policy optimization (PPO) to balance a pole on a cart by pushing left or right. The
script simulates the cart, so **these data are synthetic**. An iterable dataset runs the policy in 16 environments at
once and yields the transitions. An epoch is one such rollout, with four passes of PPO over it. An episode ends when
the pole falls, or after 500 steps.
""",
        described="The mean length of the latest episodes, and the losses of policy and value",
        panels=(
            Curves("Mean length of the latest 32 episodes", {"episode_length": "steps until the pole falls"}),
            Curves("Value loss and entropy", {"value_loss_epoch": "value loss", "entropy_epoch": "entropy"}, log=True),
        ),
        numbers=(
            ("mean length of 100 episodes after training", "episode_length", ".0f"),
            ("before training", "untrained_episode_length", ".0f"),
            ("training episodes", "episodes", ".0f"),
        ),
        uses=(
            "[an iterable dataset](../data.md) that uses the task during training",
            "[logging by step and by epoch](../trainer.md#logging)",
            "[`gradient_clip_val`](../trainer.md)",
            "[`EarlyStopping`](../callbacks.md#earlystopping) with a `stopping_threshold`",
            SAVING,
        ),
        following=(
            "[Manual optimization](../trainer.md#by-hand): for algorithms with several updates in a step",
            "[Your own callback](../extending.md): to record finished episodes",
        ),
        learned=("episode_length", "above", 40.0),
        falls="",
        small="six rollouts",
    ),
    Example(
        name="kfold",
        title="k-fold cross-validation",
        summary="Five models, each tested on wines that it has not seen, and the spread of their accuracies.",
        text="""
Estimate accuracy by cross-validation. Five networks classify scikit-learn's 178 wines of three cultivars by 13
measurements. Each is trained on four fifths of the wines and predicts the rest, so every wine is predicted once, by a
model that has not seen it. Each fold has its own Trainer, seed and folder. Early stopping uses the held-out fold, so
the results are slightly optimistic.
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
            ("standard deviation of the folds", "deviation_of_folds", ".1%"),
        ),
        uses=(
            "a `Trainer` for each fold, with its own seed and logger `version`",
            SAVING,
            STOPPING,
            PREDICTING,
            "[`drivetrain report`](../run-report.md#pages-made-later-and-comparisons) compares the folds on one page",
        ),
        following=(
            "`examples/by_feature/cross_validation.py`: folds in your own loop, on several processes",
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
        summary="A small network learns more from a larger one than from 100 labels.",
        text="""
Train a small network with the outputs of a larger one. A convolutional teacher of 31,000 parameters is trained on 100
labelled digits of scikit-learn, with random shifts. A student of 1,510 parameters is trained twice from the same
initial weights: on these labels only, and on the teacher's softened outputs for all 1257 training images, without
labels. The three runs have separate folders.
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
            "a frozen network outside the task, which is neither trained nor saved",
            "[`val_check_interval` over epochs](../trainer.md) with `check_val_every_n_epoch=None`",
            METRICS,
            SAVING,
            RATES,
        ),
        following=(
            "[Contrastive learning](contrastive.md): the same images without labels",
            "[Plain weights](../checkpoints.md#plain-weights): export the student",
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
