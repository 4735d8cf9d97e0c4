"""A script as people write them: everything at the top of the module, nothing torn down by hand."""

import torch

from drivetrain import Accelerator

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
accelerator.print("trained on", accelerator.num_processes)
