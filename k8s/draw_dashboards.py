"""What the dashboards show. `python -m k8s.draw_dashboards` writes it to k8s/dashboards/*.json."""

from pathlib import Path
from typing import Final

from k8s.grafana import Dashboard, Panel, as_json, mean, quantiles, rate

FOLDER: Final = Path(__file__).with_name("dashboards")
# Who asks for health is no client.
_CALLS: Final = 'pagoda_router_requests_total{method!="/health"}'
_FAULTS: Final = 'pagoda_router_requests_total{code=~"INTERNAL|UNAVAILABLE|UNKNOWN", method!="/health"}'

OVERVIEW: Final = Dashboard(
    "pagoda-overview",
    "Pagoda / Overview",
    (
        Panel("Requests", "reqps", {"{{code}}": rate("pagoda_router_requests_total", "code")}, stacked=True),
        Panel(
            "Calls that failed through no fault of the client's",
            "percentunit",
            {"failed": f"({rate(_FAULTS)} or vector(0)) / {rate(_CALLS)}"},
        ),
        Panel("Errors", "reqps", {"{{reason}}": rate("pagoda_router_errors_total", "reason")}, stacked=True),
        Panel(
            "Time to first token",
            "s",
            quantiles("pagoda_router_time_to_first_token_seconds", "", 0.5, 0.95, 0.99),
        ),
        Panel(
            "First tokens later than 2.5 s; the objective is 1 %",
            "percentunit",
            {"in 1 h": "pagoda:ttft_slow:ratio_rate1h", "in 6 h": "pagoda:ttft_slow:ratio_rate6h"},
        ),
        Panel("Time between tokens", "s", quantiles("pagoda_router_inter_token_latency_seconds")),
        Panel("Time of whole requests", "s", quantiles("pagoda_router_request_duration_seconds")),
        Panel("Time in the queue", "s", quantiles("pagoda_scheduler_queue_seconds")),
        Panel(
            "Tokens per second",
            "short",
            {
                "prompt": rate("pagoda_router_prompt_tokens_total"),
                "output": rate("pagoda_router_output_tokens_total"),
            },
        ),
        Panel(
            "Sequences",
            "short",
            {
                "running": "sum(pagoda_scheduler_running_sequences)",
                "waiting": "sum(pagoda_scheduler_waiting_sequences)",
            },
        ),
        Panel(
            "KV blocks that are used",
            "percentunit",
            {"{{instance}}": 'pagoda_kv_utilisation_ratio{tier="device"}'},
        ),
        Panel(
            "Failures that requests survived",
            "short",
            {
                "resubmitted": rate("pagoda_router_resubmits_total"),
                "tried on another replica": rate("pagoda_router_retries_total"),
                "reconnects": rate("pagoda_router_scheduler_reconnects_total"),
                "lost shards": rate("pagoda_scheduler_shard_losses_total"),
            },
        ),
        Panel(
            "Up",
            "short",
            {
                "{{scheduler}} for router {{instance}}": "pagoda_router_scheduler_up",
                "shard of {{instance}}": "pagoda_scheduler_shard_up",
            },
        ),
        Panel(
            "Processes",
            "short",
            {
                "{{job}} {{version}}": "count by (job, version) (pagoda_build_info)",
                # Enough of the revision to tell them apart.
                "{{name}} {{revision}}": "count by (name, revision) (label_replace("
                'pagoda_model_info{name!=""}, "revision", "$1", "revision", "(.{12}).*"))',
            },
        ),
        Panel("Stale files", "short", {"{{files}} {{instance}}": "pagoda_stale_files"}),
    ),
)

MEMORY: Final = Dashboard(
    "pagoda-memory",
    "Pagoda / KV memory",
    (
        Panel(
            "Device blocks",
            "short",
            {"{{state}}": 'sum by (state) (pagoda_kv_blocks{tier="device"})'},
            stacked=True,
        ),
        Panel(
            "Host blocks",
            "short",
            {"{{state}}": 'sum by (state) (pagoda_kv_blocks{tier="host"})'},
            stacked=True,
        ),
        Panel("Utilisation", "percentunit", {"{{tier}} {{instance}}": "pagoda_kv_utilisation_ratio"}),
        Panel("Waste: empty slots of used blocks", "percentunit", {"{{instance}}": "pagoda_kv_waste_ratio"}),
        Panel(
            "Token slots of used blocks",
            "short",
            {"{{state}}": "sum by (state) (pagoda_kv_slots)"},
            stacked=True,
        ),
        Panel(
            "Sharing and fragmentation",
            "short",
            {
                "shared {{tier}} blocks": "sum by (tier) (pagoda_kv_shared_blocks)",
                "partial blocks": "sum(pagoda_kv_partial_blocks)",
            },
        ),
        Panel(
            "Prefix cache: share of tokens found",
            "percentunit",
            {
                "now": f"{rate('pagoda_prefix_cache_hit_tokens_total')}"
                f" / {rate('pagoda_prefix_cache_queried_tokens_total')}",
                "in 15 min {{instance}}": "pagoda:prefix_cache_hits:ratio_rate15m",
            },
        ),
        Panel(
            "Prefix cache: tokens per second",
            "short",
            {
                "looked up": rate("pagoda_prefix_cache_queried_tokens_total"),
                "found": rate("pagoda_prefix_cache_hit_tokens_total"),
            },
        ),
        Panel(
            "Blocks per second",
            "short",
            {
                "copied on write": rate("pagoda_kv_block_copies_total"),
                "evicted": rate("pagoda_kv_block_evictions_total"),
            },
        ),
        Panel(
            "Preemptions per second",
            "short",
            {"{{mode}}": rate("pagoda_scheduler_preemptions_total", "mode")},
        ),
        Panel(
            "Swapped blocks per second",
            "short",
            {"{{direction}}": rate("pagoda_kv_blocks_swapped_total", "direction")},
        ),
        Panel("Swapping", "Bps", {"{{direction}}": rate("pagoda_kv_swapped_bytes_total", "direction")}),
    ),
)

SCHEDULER: Final = Dashboard(
    "pagoda-scheduler",
    "Pagoda / Scheduler",
    (
        Panel(
            "Running sequences",
            "short",
            {
                "{{instance}}": "pagoda_scheduler_running_sequences",
                "at most {{instance}}": "pagoda_scheduler_max_running_sequences",
            },
        ),
        Panel(
            "Waiting sequences",
            "short",
            {
                "{{instance}}": "pagoda_scheduler_waiting_sequences",
                "paused {{instance}}": "pagoda_scheduler_paused_sequences",
            },
        ),
        Panel(
            "Age of the oldest that never ran",
            "s",
            {"{{instance}}": "pagoda_scheduler_oldest_waiting_seconds"},
        ),
        Panel("Time in the queue", "s", quantiles("pagoda_scheduler_queue_seconds", "", 0.5, 0.95, 0.99)),
        Panel("Tokens still to compute", "short", {"{{instance}}": "pagoda_scheduler_outstanding_tokens"}),
        Panel(
            "Steps per second",
            "short",
            {"{{instance}}": rate("pagoda_scheduler_step_seconds_count", "instance")},
        ),
        Panel(
            "Time of a step",
            "s",
            quantiles("pagoda_scheduler_step_seconds")
            | {"mean in 10 min {{instance}}": "pagoda:step_seconds:mean_rate10m"},
        ),
        Panel(
            "Its parts, on average",
            "s",
            {"{{phase}}": mean("pagoda_scheduler_step_phase_seconds", "phase")},
            stacked=True,
        ),
        Panel("Its parts, at worst", "s", quantiles("pagoda_scheduler_step_phase_seconds", "phase", 0.99)),
        Panel(
            "Tokens per second",
            "short",
            {"{{kind}}": rate("pagoda_scheduler_step_tokens_total", "kind")},
            stacked=True,
        ),
        Panel(
            "Tokens per step",
            "short",
            {
                "{{kind}}": f"{rate('pagoda_scheduler_step_tokens_total', 'kind')}"
                f" / ignoring (kind) group_left {rate('pagoda_scheduler_step_seconds_count')}"
            },
            stacked=True,
        ),
        Panel(
            "Requests",
            "reqps",
            {
                "accepted": rate("pagoda_scheduler_requests_accepted_total"),
                "refused: {{cause}}": rate("pagoda_scheduler_requests_refused_total", "cause"),
            },
        ),
        Panel(
            "Sequences that ended",
            "short",
            {"{{reason}}": rate("pagoda_scheduler_sequences_finished_total", "reason")},
            stacked=True,
        ),
        Panel(
            "Preemptions per second",
            "short",
            {"{{mode}}": rate("pagoda_scheduler_preemptions_total", "mode")},
        ),
        Panel(
            "Shard",
            "short",
            {
                "up for {{instance}}": "pagoda_scheduler_shard_up",
                "lost, per second": rate("pagoda_scheduler_shard_losses_total"),
            },
        ),
    ),
)

SHARDS: Final = Dashboard(
    "pagoda-shards",
    "Pagoda / Shards",
    (
        Panel("Tokens per second", "short", {"{{instance}}": rate("pagoda_shard_tokens_total", "instance")}),
        Panel(
            "Steps per second",
            "short",
            {"{{instance}}": rate('pagoda_shard_step_seconds_count{phase="compute"}', "instance")},
        ),
        Panel(
            "Share of time computing",
            "percentunit",
            {"{{instance}}": rate("pagoda_shard_step_seconds_sum", "instance")},
        ),
        Panel("Parts of a step, median", "s", quantiles("pagoda_shard_step_seconds", "phase", 0.5)),
        Panel("Parts of a step, at worst", "s", quantiles("pagoda_shard_step_seconds", "phase", 0.99)),
        Panel(
            "Steps that failed, per second",
            "short",
            {"{{instance}}": rate("pagoda_shard_step_failures_total", "instance")},
        ),
        Panel("KV tensor", "bytes", {"{{tier}} {{instance}}": "pagoda_shard_kv_cache_bytes"}),
        Panel(
            "Memory of the process",
            "bytes",
            {
                "rank {{rank}} on {{device}} {{instance}}": "process_resident_memory_bytes"
                " * on (namespace, job, instance) group_left (rank, device) pagoda_shard_info"
            },
        ),
        Panel(
            "Cores in use",
            "short",
            {
                "{{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"
                " and on (namespace, job, instance) pagoda_shard_info"
            },
        ),
        Panel(
            "Start",
            "percentunit",
            {
                "loaded {{instance}}": "pagoda_shard_load_ratio",
                "warm {{instance}}": "pagoda_shard_warm_up_ratio",
            },
        ),
        Panel("Epoch", "short", {"{{instance}}": "pagoda_shard_epoch"}),
        Panel("Step streams", "short", {"{{instance}}": "pagoda_shard_streams"}),
    ),
)

TENANTS: Final = Dashboard(
    "pagoda-tenants",
    "Pagoda / Tenants",
    (
        Panel("Requests", "reqps", {"{{tenant}}": rate("pagoda_router_tenant_requests_total", "tenant")}),
        Panel(
            "Prompt tokens per second",
            "short",
            {"{{tenant}}": rate('pagoda_router_tenant_tokens_total{kind="prompt"}', "tenant")},
        ),
        Panel(
            "Output tokens per second",
            "short",
            {"{{tenant}}": rate('pagoda_router_tenant_tokens_total{kind="output"}', "tenant")},
        ),
        Panel(
            "Share of all tokens",
            "percentunit",
            {
                "{{tenant}}": f"{rate('pagoda_router_tenant_tokens_total', 'tenant')}"
                f" / ignoring (tenant) group_left {rate('pagoda_router_tenant_tokens_total')}"
            },
            stacked=True,
        ),
        Panel(
            "Tokens of the last hour",
            "short",
            {"{{tenant}}": "sum by (tenant) (increase(pagoda_router_tenant_tokens_total[1h]))"},
        ),
        Panel(
            "Refused",
            "reqps",
            {
                "{{reason}}": rate(
                    'pagoda_router_errors_total{reason=~"INVALID_API_KEY|TOKEN_RATE_EXCEEDED"}', "reason"
                ),
                "too many requests of a key": rate(
                    'pagoda_scheduler_requests_refused_total{cause="key_limit"}'
                ),
            },
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, MEMORY, SCHEDULER, SHARDS, TENANTS)


def main() -> None:
    """Writes all of them."""
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(as_json(dashboard))


if __name__ == "__main__":
    main()
