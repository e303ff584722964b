"""SGLang's own ``Scheduler`` as the system of a run.

Replaced are where requests come from, where results go, the groups of processes, and the model (``runner.py``). The
loop, batches, caches, relay and sampler are SGLang's, unchanged; ``loop.py`` reads steps and ranges from the methods
that the loop calls.
"""

from __future__ import annotations

import contextlib
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ....scenarios.combinations import MODES
from ...run.compose import engine_config
from ...run.system import SystemParts, TagAudit
from ..model import model_folder, tokenizer
from ..names import EngineError
from .arguments import server_args
from .chunk_sizes import require_curve, timed_virtually
from .data_ranks import group_of_ranks, require_shares, synchronised
from .edge import fake_transfers, fitted, groups_of_one
from .grammar import install_grammars
from .hisparse import sparse_model
from .loop import SglangLoop
from .own_runner import OwnRunner
from .runner import RunnerStub


class SglangSystem(SglangLoop):
    def __init__(self, parts: SystemParts) -> None:
        super().__init__(parts)
        self._share = parts.context.share
        # The first stage sends aborts on, and so does a decode worker.
        sends_prompts = self._role == "prefill" and parts.context.link is not None
        self.aborts = not sends_prompts and (self._stage is None or self._stage.is_first)
        self.simulated = self._spec is not None and self._spec.acceptance is not None
        runner = OwnRunner if MODES["own model runner"].on(parts.resolved.scenario) else RunnerStub
        self.runner = runner(parts, self._bridge, self._reports)
        self.defaults = self.runner.defaults
        self.scheduler = self._opened()
        self.overlapped = self.scheduler.enable_overlap
        torch.cuda.synchronize()  # a server has done all work of its start long before the first request
        if self._transfers is not None:
            self._transfers.bind(self._model_runner.engine_model.port())
        self.scheduler.tokenizer = tokenizer(parts.resolved.model)
        if MODES["grammar"].on(parts.resolved.scenario):
            install_grammars(self.scheduler, parts.resolved.model)
        self.wrap_loop()
        self._name()

    def audit(self) -> TagAudit | None:
        runner = self._model_runner
        tags = runner.engine_model.tags
        if tags is None:
            return None
        return TagAudit(tags, runner.req_to_token_pool.req_to_token, self._parts.machine.peek)

    # ---- opening -------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        module = import_module("sglang.srt.managers.scheduler")
        resolved, machine = self._parts.resolved, self._parts.machine
        if self._transfers is not None:
            self._transfers.install()
        elif self._role is not None:
            fake_transfers()
        with tempfile.TemporaryDirectory(prefix="schedbench-model-") as folder:
            sparse = sparse_model(resolved.model) if MODES["hisparse"].on(resolved.scenario) else {}
            model = model_folder(resolved.model, Path(folder), **sparse)
            config = engine_config(resolved, machine)
            args = server_args(resolved, config, model, self._role)
            if not self._published(module, args):
                groups_of_one(self.runner.defaults, self._stage)
                with contextlib.suppress(ImportError):
                    servers = import_module("sglang.srt.server_args")
                    getattr(servers, "set_global_server_args_for_scheduler", lambda _: None)(args)
            self.runner.install()
            if self._share is not None:
                synchronised(self._parts, self._share)
            dynamic = MODES["dynamic chunks"].on(resolved.scenario)
            warnings = timed_virtually(self._parts) if dynamic else ()
            ports = import_module("sglang.srt.server_args").PortArgs.init_new(args)
            scheduler = fitted(
                module.Scheduler,
                server_args=args,
                port_args=ports,
                gpu_id=0,
                tp_rank=0 if self._share is None else self._share.rank,
                moe_ep_rank=0,
                pp_rank=0 if self._stage is None else self._stage.index,
                attn_cp_rank=0,
                moe_dp_rank=0,
                dp_rank=None if self._share is None else self._share.rank,
            )
            if self._share is not None:
                require_shares(scheduler, args, config)
            if dynamic:
                require_curve(scheduler, warnings)
            return scheduler

    def _published(self, module: Any, args: Any) -> bool:
        """Publish the configuration for the process, as later versions do; returns whether this one does."""
        stage, share, defaults = self._stage, self._share, self.runner.defaults
        if not hasattr(module, "SpawnRanks"):
            if share is not None:
                raise EngineError(
                    "data-parallel ranks of this SGLang need groups of processes (initialize_dp_attention)"
                )
            return False
        data = None if share is None else share.rank
        rank = module.spawn_world_rank(args, tp_rank=data or 0, pp_rank=0 if stage is None else stage.index)
        ranks = module.SpawnRanks(world_rank=rank, dp_rank=data, gpu_id=0)
        module.publish(args, role="scheduler", ranks=ranks)
        one = groups_of_one(defaults, stage)
        parallel = import_module("sglang.srt.runtime_context").get_parallel()
        if hasattr(parallel, "override_permanently"):
            groups = [name for name in dir(type(parallel)) if name.endswith("_group")]
            own = {"pp_group": import_module("sglang.srt.distributed.parallel_state")._PP}
            if share is not None:
                own["tp_group"] = group_of_ranks(share, defaults)
            parallel.override_permanently(**dict.fromkeys(groups, one) | own)
        module.bootstrap.init_parallel_runtime = lambda **_: None
        return True

    @property
    def _model_runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    def _name(self) -> None:
        """Name what steps share, for findings."""
        hazards = self._parts.machine.hazards
        if hazards is None:
            return
        runner = self._model_runner
        hazards.name(runner.req_to_token_pool.req_to_token, "req_to_token")
        relay = getattr(self.scheduler, "future_map", None)
        for name, value in vars(relay).items() if relay is not None else ():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                hazards.name(value, name)
