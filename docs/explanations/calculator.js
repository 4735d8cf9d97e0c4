// The calculator of the page "What to use where": what each process holds and sends under each strategy.
// The formulas are those of docs/strategies.md; tests/test_explanations.py compares them with what
// `drivetrain estimate-memory` computes.
"use strict";

const PRECISIONS = {
  // bytes of a weight, a gradient, one moment of the optimizer, and of a parameter as it is gathered;
  // residual, inner: bytes of activations on and beside the residual stream; logit: bytes of a logit
  "32": {weight: 4, gradient: 4, moment: 4, gathered: 4, residual: 4, inner: 4, logit: 4},
  "bf16": {weight: 4, gradient: 4, moment: 4, gathered: 2, residual: 4, inner: 2, logit: 4},
  "bf16-true": {weight: 2, gradient: 2, moment: 2, gathered: 2, residual: 2, inner: 2, logit: 2},
};
const MOMENTS = {adamw: 2, sgd_momentum: 1, sgd: 0};

// A transformer's parameters by where they are: blocks, which repeat, and the rest: an embedding, and a head that may
// be tied to it.
function sizeOf(model) {
  const untied = (model.parameters - 2 * model.vocabulary * model.width) / model.layers;
  const block = Math.max(untied, Math.min(12 * model.width ** 2, model.parameters / model.layers));
  const rest = model.parameters - model.layers * block;
  return {
    parameters: model.parameters,
    matrices: model.layers * block,
    largestUnit: Math.max(block, rest),
  };
}

// Bytes that a forward keeps for its backward: 2 values of the residual stream and 14 others for each token, layer and
// unit of width, and logits with their logarithms. `split` processes share what lies inside a block; `recompute` keeps
// the inputs of blocks, and all of one block.
function activations(model, precision, split = 1, recompute = false) {
  const each = PRECISIONS[precision];
  const tokens = model.rows * model.length;
  const inputs = tokens * model.width * each.residual;
  const block = tokens * model.width * (2 * each.residual + 2 * each.inner + (12 * each.inner) / split);
  const logits = 2 * tokens * model.vocabulary * each.logit;
  return (recompute ? model.layers * inputs + block : model.layers * block) + logits;
}

// What one process holds, in bytes, and sends in a step.
function estimate(strategy, model, precision, optimizer, processes) {
  const size = sizeOf(model), each = PRECISIONS[precision], moments = MOMENTS[optimizer];
  const P = size.parameters, N = processes, U = size.largestUnit, apart = (N - 1) / N;
  const whole = {weights: P * each.weight, gradients: P * each.gradient, optimizer: P * each.moment * moments};
  const small = precision === "32" ? 4 : 2; // what ZeRO keeps weights and gradients in, beside its copy in 32 bits
  const kept = activations(model, precision);
  let held = {...whole, gathered: 0, activations: kept}, sent = 0;
  if (strategy === "ddp") {
    sent = 2 * each.gradient * P * apart;
  } else if (strategy.startsWith("fsdp")) {
    held = {
      weights: whole.weights / N, gradients: whole.gradients / N, optimizer: whole.optimizer / N,
      gathered: N > 1 ? Math.min(2 * U, P) * each.gathered : 0,
      activations: strategy === "fsdp" ? kept : activations(model, precision, 1, true),
    };
    if (strategy === "fsdp_offload") { // shards, their gradients and the optimizer's state are in the host's memory
      held = {...held, weights: 0, gradients: U * each.gradient, optimizer: 0};
      held.gathered = Math.min(2 * U, P) * each.gathered;
    }
    sent = (2 * each.gathered + each.gradient) * P * apart;
  } else if (strategy.startsWith("deepspeed")) {
    const stage = Number(strategy.at(-1));
    held.optimizer = (P * 4 * (moments + 1)) / N;
    held.gradients = (P * small) / N;
    held.weights = stage === 3 ? (P * small) / N : P * small;
    if (N > 1 && stage === 3) held.gathered = U * small;
    if (N > 1 && stage < 3) held.gradients += (P * small) / 32;
    sent = (stage === 3 ? 3 : 2) * small * P * apart;
  } else if (strategy === "tp") {
    const share = 1 - (size.matrices / P) * (1 - 1 / N);
    held = {
      weights: whole.weights * share, gradients: whole.gradients * share, optimizer: whole.optimizer * share,
      gathered: 0, activations: activations(model, precision, N),
    };
    sent = 8 * model.layers * model.rows * model.length * model.width * each.inner * apart;
  }
  const total = held.weights + held.gradients + held.optimizer + held.gathered + held.activations;
  return {...held, total, sent};
}

// Title, strategy as the Trainer takes it, and whether it spreads one batch over the processes.
const STRATEGIES = {
  single: ["single", '"single"'],
  ddp: ["DDP", '"ddp"'],
  deepspeed_stage_1: ["ZeRO-1", '"deepspeed_stage_1"'],
  deepspeed_stage_2: ["ZeRO-2", '"deepspeed_stage_2"'],
  deepspeed_stage_3: ["ZeRO-3", '"deepspeed_stage_3"'],
  fsdp: ["FSDP", '"fsdp"'],
  fsdp_recompute: ["FSDP, activations recomputed", "FSDP(activation_checkpointing=True)"],
  fsdp_offload: ["the same, state on the host", "FSDP(activation_checkpointing=True, cpu_offload=True)"],
  tp: ["tensor parallel", 'Parallel(tp=DEVICES, tp_plan="auto")'],
};
// The first of these that fits is advised: what sends least, and needs the fewest parts, comes first.
const ADVISED = ["ddp", "fsdp", "fsdp_recompute", "fsdp_offload"];
const ROOM = 0.9; // of a device's memory; the rest is for the driver, for buffers of libraries and for gaps

function lineOf(strategy, precision, processes) {
  const devices = strategy === "single" ? 1 : processes;
  const text = STRATEGIES[strategy][1].replace("DEVICES", devices);
  return `Trainer(devices=${devices}, strategy=${text}, precision="${precision}")`;
}

function advice(model, precision, optimizer, processes, memory) {
  const order = processes === 1 ? ["single", "fsdp_recompute", "fsdp_offload"] : ADVISED;
  return order.find((name) => estimate(name, model, precision, optimizer, processes).total <= ROOM * memory);
}

// the page

const PRESETS = {
  "GPT-2, 124 M": [0.124, 12, 768, 50257, 1024],
  "1.1 B": [1.1, 22, 2048, 32000, 2048],
  "7 B": [6.7, 32, 4096, 32000, 4096],
  "13 B": [13, 40, 5120, 32000, 4096],
  "70 B": [69, 80, 8192, 32000, 4096],
};

function shown(bytes) {
  return bytes >= 1e12 ? `${(bytes / 1e12).toFixed(1)} TB` : `${(bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1)} GB`;
}

function fill(form) {
  const number = (name) => Math.max(0, Number(form.elements[name].value));
  const model = {
    parameters: number("parameters") * 1e9, layers: Math.max(1, number("layers")), width: number("width"),
    vocabulary: number("vocabulary"), rows: number("rows"), length: number("tokens"),
  };
  const precision = form.elements.precision.value, optimizer = form.elements.optimizer.value;
  const devices = Math.max(1, Math.round(number("devices"))), memory = number("memory") * 1e9;
  const speed = Math.max(1e-3, number("speed")) * 1e9;
  const best = advice(model, precision, optimizer, devices, memory);
  const rows = Object.keys(STRATEGIES).filter((name) => devices > 1 || !["ddp", "tp"].includes(name)).map((name) => {
    const use = estimate(name, model, precision, optimizer, devices);
    const fits = use.total <= ROOM * memory ? "fits" : use.total <= memory ? "tight" : "too large";
    const row = document.createElement("tr");
    row.dataset.strategy = name;
    row.className = fits.replace(" ", "-") + (name === best ? " best" : "");
    const cells = [
      STRATEGIES[name][0], shown(use.total), fits, shown(use.weights + use.gradients + use.optimizer),
      shown(use.gathered), shown(use.activations), shown(use.sent), `${(use.sent / speed).toFixed(2)} s`,
    ];
    for (const words of cells) row.appendChild(document.createElement("td")).textContent = words;
    return row;
  });
  document.querySelector("#calculator tbody").replaceChildren(...rows);
  document.querySelector("#calculator p code").textContent = best
    ? lineOf(best, precision, devices)
    : "Nothing fits: take more devices, a smaller micro-batch, shorter sequences, or Parallel over several dimensions.";
}

function begin() {
  const form = document.querySelector("#calculator form");
  if (!form) return;
  const presets = form.elements.preset;
  for (const name of Object.keys(PRESETS)) presets.add(new Option(name, name));
  presets.value = "7 B";
  const take = () => {
    const names = ["parameters", "layers", "width", "vocabulary", "tokens"];
    names.forEach((name, place) => { form.elements[name].value = PRESETS[presets.value][place]; });
    fill(form);
  };
  presets.addEventListener("change", take);
  form.addEventListener("input", () => fill(form));
  form.addEventListener("submit", (event) => event.preventDefault());
  take();
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
