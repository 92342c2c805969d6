"""The workers of an outer launcher, of which this process is one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from paceline.workers._elastic_group import ElasticGroup
from paceline.workers.pools._outer_launcher_pool import JoinedPool

if TYPE_CHECKING:
    from paceline.core import DistributedContext

T = TypeVar("T")


class JoinedGroup(ElasticGroup):
    """All processes that srun, mpirun, torchrun or another launcher has started.

    Each of them makes the group, and carries out calls as its rank. Lost workers are not started
    again here: what was trained goes on from its last checkpoint when the launcher starts the
    processes again. Subclasses make the `JoinedPool`.
    """

    can_restart = False
    _is_set_up = False

    @property
    def joined_pool(self) -> JoinedPool:
        """The pool of these processes."""
        assert isinstance(self._pool, JoinedPool)
        return self._pool

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self.joined_pool.num_workers

    @property
    def is_alive(self) -> bool:
        """Whether this process is set up beside the others, and no call has failed."""
        return super().is_alive and self._is_set_up

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0; it joins the others for that."""
        return self.join().rank == 0

    def join(self) -> "DistributedContext":
        """Join the other processes, unless that was done, and return this one's place."""
        pool = self.joined_pool
        if not pool.is_alive:
            pool.start()
        return pool.distributed

    def decide(self, choose: Callable[[], T]) -> T:
        """Return on every rank what the chief has chosen.

        Raises:
            DistributedPeerError: The chief could not choose.
            Exception: What `choose` raised here.
        """
        distributed = self.join()
        try:
            return distributed.broadcast(choose() if distributed.rank == 0 else None)  # type: ignore[return-value] # the chief's
        except Exception as error:
            distributed.fail(error)
            self.joined_pool.shutdown()
            raise

    def try_form(self) -> float:
        """Join the other processes, unless that was done, and set this one up; return 0."""
        self.join()
        self._set_up()
        self._is_set_up = True
        self.num_formed += 1
        return 0.0

    def stop(self, *, force: bool = False) -> None:
        """Leave the others."""
        super().stop(force=force)
        self._is_set_up = False
