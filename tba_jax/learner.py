"""One optimizer step as one jitted function.

    log_pi = token_logprobs(params, batch);   loss, metrics = loss_fn(log_pi, batch, beta=beta);   params <- optimizer

Nothing here knows which loss it trains, but whether it needs a scalar head beside the model. Nothing asks the host
anything: a step is dispatched and the caller reads metrics when it wants. A step with a loss or gradient that is not
finite leaves params, optimizer state and version as they were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax import compiler_options, sharding
from tba_jax.losses import diagnostics
from tba_jax.losses.registry import LossFn, LossSpec, get_loss, head_keywords
from tba_jax.losses.trajectory_balance import scaled_residuals
from tba_jax.models import lora as lora_lib
from tba_jax.models import scalar_head, transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.optimizers import Optimizer, global_norm, make_optimizer, make_schedule
from tba_jax.types import Batch, TrainState

Metrics = dict[str, jax.Array]


class Head(NamedTuple):
  """A scalar head that is trained beside the model: for which loss, and how."""

  loss: LossSpec
  optimizer: Optimizer


def make_head(loss: str, *, learning_rate: float) -> Head | None:
  """The scalar head that a loss learns, by AdamW at a constant rate; None if it needs none."""
  spec = get_loss(loss)
  schedule = make_schedule("constant", learning_rate=learning_rate)
  return Head(spec, make_optimizer("adamw", schedule=schedule, clip_norm=math.inf)) if spec.needs_head else None


def init_train_state(
  params: Any, optimizer: Optimizer, *, mesh: Mesh | None = None, head: Head | None = None, head_params: Any = ()
) -> TrainState:
  """State before the first update, on the devices of `params` (or on `mesh`): float32 parameters, optimizer state
  beside them.

  The state takes the parameters over: a train step donates them, so whoever else needs them (a reference, a searcher)
  makes a copy first.

  Args:
    params: parameter tree of jax arrays, all on one device or all laid out on one mesh; with `mesh`, anything that can
      be put there.
    optimizer: from `optimizers.make_optimizer`.
    mesh: lay the parameters out on this mesh by the rules of `tba_jax.sharding`.
    head, head_params: a scalar head from `models.scalar_head` to train as well.
  """
  if mesh is not None:
    params = sharding.put_alike(params, sharding.param_shardings(params, mesh))
  layout = jax.tree.map(lambda leaf: leaf.sharding, params)
  create = functools.partial(fresh_state, optimizer=optimizer, head=head, head_params=head_params)
  abstract = jax.eval_shape(create, params)
  place = jax.tree.leaves(layout)[0]
  if isinstance(place, NamedSharding):
    out = sharding.state_shardings(abstract, *_with_head(params, layout, abstract.head, place.mesh), place.mesh)
  else:
    out = jax.tree.map(lambda _: place, abstract)
  # Parameters pass by outside jit, which would hold two copies of them for a moment. device_put copies nothing here: it
  # commits them to where they are, without which the second step would be compiled again.
  float32 = jax.tree.map(lambda leaf, where: jax.device_put(leaf.astype(jnp.float32), where), params, layout)
  rest = jax.jit(lambda p: create(p)._replace(params=None), out_shardings=out._replace(params=None))(float32)
  return rest._replace(params=float32)


def fresh_state(
  params: Any, *, optimizer: Optimizer, head: Head | None = None, head_params: Any = ()
) -> TrainState:
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
  state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0), jnp.int32(0))
  if head is None:
    return state
  return state._replace(head=head_params, head_opt_state=head.optimizer.init(head_params))


def abstract_state(
  cfg: ModelConfig, optimizer: Optimizer, *, lora: lora_lib.LoraSettings | None = None, head: Head | None = None,
  mesh: Mesh
) -> tuple[TrainState, TrainState]:
  """Shapes and dtypes of a state, and its shardings on a mesh."""
  trained = transformer.abstract_params(cfg, jnp.float32)
  trained = trained if lora is None else lora_lib.abstract_adapters(cfg, settings=lora)
  create = functools.partial(fresh_state, optimizer=optimizer, head=head)
  if head is None:
    state = jax.eval_shape(create, trained)
  else:
    state = jax.eval_shape(lambda p, h: create(p, head_params=h), trained, scalar_head.abstract_scalar_head(cfg))
  layout = sharding.param_shardings(trained, mesh)
  return state, sharding.state_shardings(state, *_with_head(trained, layout, state.head, mesh), mesh)


def _with_head(params: Any, layout: Any, head: Any, mesh: Mesh) -> tuple[Any, Any]:
  """Parameters and their shardings, with those of the head if there is one."""
  head = dict(head)
  return {**params, **head}, {**layout, **sharding.param_shardings(head, mesh)}


def make_scorer(
  cfg: ModelConfig, *, temperature: float, dtype: Any, chunk_tokens: int, rows_at_once: int = 0, backend: str = "xla",
  mesh: Mesh | None = None,
) -> Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]:
  """Jitted `score(params, tokens, positions, segment_ids) -> log_p` float32 [B, T]: the train step's log_pi, without a
  gradient.

  Entry t is log p(token t | tokens < t of its segment) at `temperature` over the full vocabulary; the first of a
  segment and padding are 0. It runs where its arguments are; give `mesh` if that is more than one device. `backend`:
  see `models.attention`. `rows_at_once`: rows whose activations exist at once, 0 for all; more rows go in pieces.
  """

  def piece(params: Any, *rows: jax.Array) -> jax.Array:
    return token_logprobs(
      params, cfg, *rows, temperature=temperature, dtype=dtype, chunk_tokens=chunk_tokens, backend=backend, mesh=mesh,
      constrain=sharding.activation_constraint(mesh),
    )[0]

  @jax.jit
  def score(params: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    rows = (tokens, positions, segment_ids)
    num_rows, length = tokens.shape
    if not 0 < rows_at_once < num_rows:
      return piece(params, *rows)
    padding = ((0, -num_rows % rows_at_once), (0, 0))
    pieces = tuple(jnp.pad(x, padding).reshape(-1, rows_at_once, length) for x in rows)
    return jax.lax.map(lambda part: piece(params, *part), pieces).reshape(-1, length)[:num_rows]

  return score


def make_train_step(
  cfg: ModelConfig,
  loss_fn: LossFn,
  optimizer: Optimizer,
  *,
  temperature: float,
  compute_dtype: Any,
  remat: str,
  micro_batches: int,
  chunk_tokens: int,
  whole_groups_per_micro_batch: bool = False,
  skip_empty_micro_batches: bool = False,
  most_response_tokens: int = 0,
  backend: str = "xla",
  lora: lora_lib.LoraSettings | None = None,
  mesh: Mesh | None = None,
  with_residuals: bool = False,
  with_reference: bool = True,
  head: Head | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """Jitted `step(state, batch, beta) -> (state, metrics)`; the state is donated, beta is a float32 scalar.

  With `lora` it is `step(state, batch, beta, base)`: the state's parameters are the adapters, which alone are
  differentiated and have optimizer state; the base, in any dtype, is read and not donated.

  It runs on the state's device, or on `mesh`; no global default is read, so steps of other threads on other devices go
  on beside it. The batch may be numpy. Its rows must be a multiple of micro_batches x data x fsdp (see `collate`).

  Args:
    cfg: the model.
    loss_fn: (log_pi [B, T], batch, beta=) -> (loss, metrics), normalised by the batch's own counts.
    optimizer: from `optimizers.make_optimizer`.
    temperature: of log_pi; the same as of log_ref.
    compute_dtype: of activations and matrix products; parameters, log-probabilities and losses are float32.
    remat: what the backward pass computes again, by the model's name for it.
    micro_batches: parts that the rows are split into, one after another, to save activation memory. The result does not
      depend on it.
    chunk_tokens: positions whose logits exist at once.
    whole_groups_per_micro_batch: the caller's word that no group has rows in two micro-batches. Each part is then one
      forward and one backward pass. Otherwise the step runs forward twice: all of log_pi first, then backward with the
      whole batch's coefficients dloss / dlog_pi, which is exact for any loss.
    skip_empty_micro_batches: parts behind the last row that holds tokens are not computed, as packing leaves them.
    most_response_tokens: the caller's word that no row has more, and that those of a row are adjacent: the head then
      runs for them alone. 0: for all tokens.
    backend: of attention, see `models.attention`.
    lora: train adapters of these settings on a frozen base.
    mesh: from `sharding.make_mesh`.
    with_residuals: add to the metrics "residuals_N", float32 [N]: |log Z - delta| of each response before the update,
      nats, 0 where not valid; for a replay buffer that draws by it.
    with_reference: False: log_ref holds nothing, and the metrics that are made of it are left out.
    head: the state has a scalar head, which `loss_fn` reads and which is updated along with the parameters. It changes
      neither their gradient nor their update.
  Metrics: loss; grad_norm before clipping; param_norm after, and update_norm of, the update (0 if skipped);
    learning_rate; beta; entropy (nats, mean over response tokens of valid responses); skipped (1 if loss or gradient
    norm was not finite); with a head head_grad_norm, which counts for that too; and the loss's own.
  """
  if micro_batches < 1:
    raise ValueError(f"micro_batches={micro_batches} must be at least 1.")

  def score(trained: Any, batch: Batch, *, frozen: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    params = trained
    if lora is not None:
      params, beside = _split_head(trained)
      params = {**lora_lib.attach(*frozen, params, scale=lora.scale), **beside}
    wanted = batch.sequence_ids < batch.rewards.shape[0] if most_response_tokens else None
    return token_logprobs(
      params, cfg, batch.tokens, batch.positions, batch.segment_ids, temperature=temperature, dtype=compute_dtype,
      remat=remat, chunk_tokens=chunk_tokens, wanted=wanted, most_wanted=most_response_tokens, backend=backend,
      mesh=mesh, constrain=sharding.activation_constraint(mesh),
    )

  gradients = functools.partial(
    _gradients,
    loss_fn=loss_fn,
    micro_batches=micro_batches,
    one_pass=micro_batches == 1 or whole_groups_per_micro_batch,
    skip_empty=skip_empty_micro_batches,
    constrain_grads=_grad_constraint(mesh),
    mesh=mesh,
    with_residuals=with_residuals,
    with_reference=with_reference,
    head=head,
  )

  norm = functools.partial(global_norm, in_blocks=mesh is None or mesh.size == 1)

  def step(state: TrainState, batch: Batch, beta: Any, *frozen: Any) -> tuple[TrainState, Metrics]:
    beta = jnp.asarray(beta, jnp.float32)
    trained = {**state.params, **dict(state.head)}
    grads, metrics = gradients(trained, batch, beta, score=functools.partial(score, frozen=frozen))
    return _apply(state, grads, metrics | {"beta": beta}, optimizer, head, norm=norm)

  if mesh is None:
    return jax.jit(step, donate_argnums=0)
  _, state_out = abstract_state(cfg, optimizer, lora=lora, head=head, mesh=mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  base = transformer.abstract_params(cfg, jnp.float32)
  frozen_in = () if lora is None else (sharding.param_shardings(base, mesh),)
  return jax.jit(
    step,
    donate_argnums=0,
    # Of batches without advantages their sharding says nothing.
    in_shardings=(state_out, sharding.batch_sharding(mesh, with_advantages=True), replicated, *frozen_in),
    out_shardings=(state_out, replicated),
    compiler_options=compiler_options.of_sequences(mesh.devices.flat[0].platform),
  )


def _gradients(
  params: Any,
  batch: Batch,
  beta: jax.Array,
  *,
  score: Callable[[Any, Batch], tuple[jax.Array, ...]],
  loss_fn: LossFn,
  micro_batches: int,
  one_pass: bool,
  skip_empty: bool,
  constrain_grads: Callable[[Any], Any],
  mesh: Mesh | None,
  with_residuals: bool,
  with_reference: bool,
  head: Head | None,
) -> tuple[Any, Metrics]:
  """Gradient of the whole batch's loss by the parameters, and the loss, the entropy and the loss's metrics.

  A score is (log_pi, entropy) and, with a head, what that reads: [B, T] each.
  """

  def loss_of(batch: Batch, log_pi: jax.Array, *scalar: jax.Array) -> tuple[jax.Array, Metrics]:
    return loss_fn(log_pi, batch, beta=beta, **(head_keywords(head.loss, *scalar, batch) if head else {}))

  def part_loss(params: Any, part: Batch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores = score(params, part)
    return loss_of(part, *_without_entropy(scores))[0], scores

  def weighted(params: Any, part: Batch, coefficients: tuple[jax.Array, ...]) -> jax.Array:
    learnt = _without_entropy(score(params, part))
    return sum(jnp.sum(values * weights) for values, weights in zip(learnt, coefficients, strict=True))

  if micro_batches == 1:
    grads, scores = jax.grad(part_loss, has_aux=True)(params, batch)
  else:
    parts = split_rows(batch, micro_batches, mesh)
    loop = functools.partial(_loop, _num_parts_in_use(parts) if skip_empty else micro_batches)
    take = lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
    put = lambda all_scores, i, scores: jax.tree.map(
      lambda whole, part: _spread(jax.lax.dynamic_update_index_in_dim(whole, part, i, 0), mesh), all_scores, scores
    )
    zeros = constrain_grads(jax.tree.map(jnp.zeros_like, params))
    add = lambda total, grads: constrain_grads(jax.tree.map(jnp.add, total, grads))
    no_scores = (_spread(jnp.zeros(parts.tokens.shape, jnp.float32), mesh),) * (3 if head else 2)
    if one_pass:

      def both(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        grads, scores = jax.grad(part_loss, has_aux=True)(params, take(parts, i))
        return add(carry[0], grads), put(carry[1], i, scores)

      grads, scores = loop(both, (zeros, no_scores))
    else:
      scores = loop(lambda i, scores: put(scores, i, score(params, take(parts, i))), no_scores)
      learnt = tuple(values.reshape(batch.tokens.shape) for values in _without_entropy(scores))
      coefficients = jax.grad(lambda learnt: loss_of(batch, *learnt)[0])(learnt)
      coefficients = tuple(_split(weights, micro_batches, mesh) for weights in coefficients)
      grads = loop(lambda i, total: add(total, jax.grad(weighted)(params, *take((parts, coefficients), i))), zeros)
    scores = tuple(values.reshape(batch.tokens.shape) for values in scores)
  # Metrics need not add up over parts (maxima, quantiles): they are taken once, of the whole batch, which costs no pass
  # of the model.
  log_pi, entropy = scores[:2]
  loss, metrics = loss_of(batch, *_without_entropy(scores))
  if not with_reference:
    metrics = {name: value for name, value in metrics.items() if name not in diagnostics.OF_REFERENCE}
  residuals = {"residuals_N": jnp.abs(scaled_residuals(log_pi, batch, beta=beta)) / beta} if with_residuals else {}
  return constrain_grads(grads), {
    **diagnostics.finish_metrics(metrics),
    **residuals,
    "loss": loss,
    "entropy": _mean_over_response_tokens(entropy, batch),
  }


def _without_entropy(scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
  """What a loss is made of."""
  return scores[:1] + scores[2:]


def _split_head(trained: Any) -> tuple[Any, Any]:
  """The model's parameters, and those of the head beside them, if any; or gradients of both."""
  model = {name: node for name, node in trained.items() if name != scalar_head.NAME}
  return model, {name: node for name, node in trained.items() if name == scalar_head.NAME}


def _num_parts_in_use(parts: Batch) -> jax.Array:
  """Number of micro-batches up to the last one that holds a token."""
  in_use = jnp.any(parts.segment_ids > 0, axis=(1, 2))
  return jnp.max(jnp.where(in_use, jnp.arange(1, in_use.shape[0] + 1), 0))


def _loop(count: int | jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
  """body(i, carry) for i < count. A count that the compiler knows lets it plan the loop."""
  if isinstance(count, int):
    return jax.lax.scan(lambda carry, i: (body(i, carry), None), carry, jnp.arange(count))[0]
  return jax.lax.fori_loop(0, count, body, carry)


def split_rows(batch: Batch, micro_batches: int, mesh: Mesh | None = None) -> Batch:
  """The batch as `micro_batches` runs of consecutive rows, on a new leading axis of every array.

  A response is valid only in the part that holds its tokens, so that losses of parts add up; counts remain those of the
  whole batch.
  Raises: ValueError if the rows do not split evenly over micro-batches and devices.
  """
  num_rows, num_responses = batch.tokens.shape[0], batch.rewards.shape[0]
  shards = sharding.num_batch_shards(mesh)
  if num_rows % (micro_batches * shards):
    raise ValueError(
      f"a batch of {num_rows} rows does not split into micro_batches={micro_batches} over {shards} devices; "
      f"collate it with row_multiple={micro_batches * shards}."
    )
  per_token = [name for name in sharding.PER_TOKEN_FIELDS if getattr(batch, name) is not None]
  parts = {name: _split(getattr(batch, name), micro_batches, mesh) for name in per_token}
  repeat = lambda x: jnp.broadcast_to(x, (micro_batches, *jnp.shape(x)))
  owners = parts["sequence_ids"].reshape(micro_batches, -1)
  present = jax.vmap(lambda ids: jnp.zeros(num_responses + 1, bool).at[ids].set(True)[:num_responses])(owners)
  rest = {name: repeat(getattr(batch, name)) for name in Batch._fields if name not in sharding.PER_TOKEN_FIELDS}
  return Batch(**parts, **{**rest, "valid": rest["valid"] & present})


def _split(rows: jax.Array, micro_batches: int, mesh: Mesh | None) -> jax.Array:
  """[B, T] -> [M, B / M, T], each part spread over all devices of the mesh."""
  return _spread(rows.reshape(micro_batches, rows.shape[0] // micro_batches, *rows.shape[1:]), mesh)


def _spread(parts: jax.Array, mesh: Mesh | None) -> jax.Array:
  """Lays [M, B / M, T] out with each part on all devices of the mesh."""
  if mesh is None:
    return parts
  spec = PartitionSpec(None, sharding.LOGICAL_TO_MESH["batch"])
  return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))


def _grad_constraint(mesh: Mesh | None) -> Callable[[Any], Any]:
  """Lays gradients out like parameters, so that they are reduced into shards instead of being whole on every device."""
  if mesh is None:
    return lambda grads: grads
  return lambda grads: jax.lax.with_sharding_constraint(grads, sharding.param_shardings(grads, mesh))


def _apply(
  state: TrainState, grads: Any, metrics: Metrics, optimizer: Optimizer, head: Head | None, *,
  norm: Callable[[Any], jax.Array]
) -> tuple[TrainState, Metrics]:
  """The update, or the old state if loss or gradient norm is not finite: selected by value, without asking the host."""
  grads, head_grads = _split_head(grads)
  grad_norm = norm(grads)
  finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
  if head is not None:
    metrics = metrics | {"head_grad_norm": norm(head_grads)}
    finite &= jnp.isfinite(metrics["head_grad_norm"])
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params, grad_norm=grad_norm)
  # Two things are made of the updates, and XLA:CPU would compute them for each, from four arrays as large.
  updates = jax.lax.platform_dependent(updates, cpu=jax.lax.optimization_barrier, default=lambda x: x)
  params = keep(optax.apply_updates(state.params, updates), state.params)
  applied = finite.astype(jnp.int32)
  if head is not None:
    head_updates, head_opt_state = head.optimizer.update(head_grads, state.head_opt_state, state.head)
    state = state._replace(head=keep(optax.apply_updates(state.head, head_updates), state.head),
                           head_opt_state=keep(head_opt_state, state.head_opt_state))
  metrics = metrics | {
    "grad_norm": grad_norm,
    "param_norm": norm(params),
    "update_norm": jnp.where(finite, norm(updates), 0.0),
    "learning_rate": jnp.asarray(optimizer.schedule(state.version), jnp.float32),
    "skipped": 1.0 - finite.astype(jnp.float32),
  }
  return state._replace(
    params=params,
    opt_state=keep(opt_state, state.opt_state),
    version=state.version + applied,
    steps=state.steps + 1,
    skipped_in_row=(state.skipped_in_row + 1) * (1 - applied),
  ), metrics


def _mean_over_response_tokens(values: jax.Array, batch: Batch) -> jax.Array:
  counted = jnp.concatenate([batch.valid, jnp.zeros(1, bool)])[batch.sequence_ids]
  return jnp.sum(jnp.where(counted, values, 0.0)) / jnp.maximum(batch.num_tokens, 1.0)
