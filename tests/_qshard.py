import sys, torch
from torch import nn
from tests.inference import test_adapters as t
from drivetrain import QLoRA, Accelerator
from tests.pool import run_in_processes
from torch.distributed.tensor import DTensor

def go(quantizer, base, strategy, evaluate=True):
    acc = Accelerator(cpu=True, strategy=strategy)
    model = t.made(0); torch.manual_seed(1)
    QLoRA(rank=4, quantizer=quantizer, base=base).apply(model)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    n = acc.num_processes
    ld = torch.utils.data.DataLoader(t.samples(), 8//n)
    model, opt, ld = acc.prepare(model, opt, ld)
    out=[]
    for x,y in ld:
        if evaluate:
            model.eval()
            with torch.no_grad(): model(x)
            model.train()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        acc.backward(loss); opt.step()
    sizes = {n: (p.to_local().numel() if isinstance(p, DTensor) else p.numel()) for n,p in acc.unwrap_model(model).named_parameters() if 'packed' in n}
    st = acc.get_state_dict(model)
    return {k: v.clone() for k,v in (st or {}).items()}, sizes

