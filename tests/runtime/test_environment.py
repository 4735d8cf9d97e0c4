"""Finding this process's place from the variables of each launcher."""

from __future__ import annotations

import pytest

from drivetrain import ConfigurationError, DrivetrainError, ProcessEnvironment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
# `srun --nodes 3 --ntasks 5`, as task 4 sees it
SLURM = {
    "SLURM_JOB_ID": "1004242",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_NODELIST": "gpu[01-20]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}
INTEL_MPI = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "999",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, ProcessEnvironment(), id="nothing"),
        pytest.param(TORCHRUN, ProcessEnvironment(5, 8, 1, 4, "node0", 1234, "torchrun"), id="torchrun on 2 machines"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            ProcessEnvironment(1, 2, 1, 2, "127.0.0.1", 29500, "torchrun"),
            id="torchrun without the sizes of machines",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"},
            ProcessEnvironment(0, 1, 0, 1, "127.0.0.1", 29500, "torchrun"),
            id="a world of one needs no local rank",
        ),
        pytest.param(SLURM, ProcessEnvironment(4, 5, 0, 1, "gpu07", 24242, "slurm"), id="SLURM, last machine"),
        pytest.param(
            {**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
            ProcessEnvironment(3, 5, 1, 2, "gpu07", 24242, "slurm"),
            id="SLURM, middle machine",
        ),
        pytest.param(
            {**SLURM, "SLURM_STEP_NODELIST": "alpha,beta", "MASTER_PORT": "77"},
            ProcessEnvironment(4, 5, 0, 1, "alpha", 77, "slurm"),
            id="SLURM, machines listed by name, port given",
        ),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "elsewhere"},
            ProcessEnvironment(4, 5, 0, 1, "elsewhere", 24242, "slurm"),
            id="SLURM, address given",
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
            ProcessEnvironment(source="slurm"),
            id="an interactive SLURM shell",
        ),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, ProcessEnvironment(), id="the shell of salloc"),
        pytest.param(OPEN_MPI, ProcessEnvironment(3, 4, 1, 2, "head", 29500, "openmpi"), id="Open MPI"),
        pytest.param(INTEL_MPI, ProcessEnvironment(3, 4, 1, 2, "head", 999, "intelmpi"), id="Intel MPI"),
        pytest.param(
            {**SLURM, **TORCHRUN},
            ProcessEnvironment(5, 8, 1, 4, "node0", 1234, "torchrun"),
            id="torchrun inside a SLURM job",
        ),
        pytest.param(
            {**SLURM, "SLURM_PROCID": "0", **INTEL_MPI},
            ProcessEnvironment(3, 4, 1, 2, "head", 999, "intelmpi"),
            id="mpirun of Intel MPI inside a SLURM job",
        ),
        pytest.param(
            {**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"},
            ProcessEnvironment(4, 5, 0, 1, "gpu07", 24242, "slurm"),
            id="srun --mpi=pmi2, which is not Intel MPI",
        ),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, ProcessEnvironment(), id="empty is not set"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, ProcessEnvironment(), id="alone under some PMI"),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, ProcessEnvironment(), id="a batch script without --ntasks"
        ),
        pytest.param(
            {**TORCHRUN, "DRIVETRAIN_LAUNCHED": "1"},
            ProcessEnvironment(5, 8, 1, 4, "node0", 1234, "drivetrain launch"),
            id="our own launcher",
        ),
    ],
)
def test_the_place_is_found(variables: dict[str, str], expected: ProcessEnvironment) -> None:
    assert ProcessEnvironment.detect(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param({"RANK": "3"}, "RANK=3 is set but WORLD_SIZE is not.*drivetrain launch", id="no size"),
        pytest.param({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not", id="rank 0 of no size"),
        pytest.param({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not", id="no rank"),
        pytest.param(without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set", id="no local rank"),
        pytest.param({**TORCHRUN, "RANK": "8"}, "Rank 8 with world size 8 .*torchrun", id="rank too large"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, "Rank -1 with world size 8", id="rank below 0"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "Rank 0 with world size 0", id="an empty world"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "4"}, "Local rank 4 of 4 processes", id="local rank too large"),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
            "9 processes on this machine, with world size 8",
            id="too many",
        ),
        pytest.param({**TORCHRUN, "RANK": "five"}, "RANK='five' is not an integer", id="not a number"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT='x' is not an integer", id="bad port"),
        pytest.param(
            without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set, but 4 of 8 processes", id="nobody says where"
        ),
        pytest.param(without(OPEN_MPI, "MASTER_ADDR"), "MASTER_ADDR.*openmpi", id="Open MPI on two machines"),
        pytest.param(without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set", id="SLURM without local rank"),
        pytest.param({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 is set but SLURM_NTASKS is not", id="SLURM without peers"),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "SLURM_PROCID=0 is set but SLURM_NTASKS is not",
            id="task 0 of a step without its size",
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
            "this is the batch script itself.*Start the script with srun",
            id="a batch script with --ntasks, not under srun",
        ),
        pytest.param(
            {**TORCHRUN, "DRIVETRAIN_LAUNCHED": "1", "RANK": "8"},
            r"Rank 8 with world size 8 \(from drivetrain launch\)",
            id="our own launcher's variables",
        ),
        pytest.param(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
            r"SLURM_STEP_TASKS_PER_NODE='2\(y3\)' is not a number",
            id="unreadable counts",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "PMI_RANK=1, PMI_SIZE=2 is set but MPI_LOCALRANKID is not",
            id="PMI without a local rank",
        ),
        pytest.param({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not", id="Open MPI without a size"),
    ],
)
def test_variables_that_cannot_be_are_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        ProcessEnvironment.detect(variables)
    assert isinstance(caught.value, DrivetrainError)
    assert isinstance(caught.value, ValueError)


def test_this_process_s_own_variables_are_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert ProcessEnvironment.detect().rank == 5


@pytest.mark.parametrize(
    ("rank", "world_size", "local_world_size", "node_rank", "num_nodes"),
    [(0, 1, 1, 0, 1), (3, 4, 4, 0, 1), (5, 8, 4, 1, 2), (4, 5, 2, 2, 3)],
)
def test_machines_are_counted(
    rank: int, world_size: int, local_world_size: int, node_rank: int, num_nodes: int
) -> None:
    found = ProcessEnvironment(rank, world_size, rank % local_world_size, local_world_size)
    assert (found.node_rank, found.num_nodes) == (node_rank, num_nodes)
    assert found.is_distributed == (world_size > 1)
