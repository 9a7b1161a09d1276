"""Lines that tell an operator why an operation waits, and what is before it."""

from api.waiting_body import AheadInfo, WaitingInfo


def wait_lines(wait: WaitingInfo | None) -> list[str]:
    """Return the reason, the work before the operation, the bound and the estimate, as far as they are known."""
    if wait is None or wait.reason is None:
        return []
    shown: dict[str, object] = {
        "waits": f"{wait.reason}: {wait.text}",
        "waits since": wait.since and f"{wait.since:%Y-%m-%d %H:%M:%S}",
        "waits until": wait.until and f"{wait.until:%Y-%m-%d %H:%M:%S}",
    }
    if (ahead := wait.ahead) is not None:
        own = f"{ahead.own_operations} of its tenant ({ahead.own_tokens} tokens with its own)"
        shown |= {
            "ahead": f"{own}, {ahead.other_operations} of others ({ahead.other_tokens} tokens)",
            "bound": _bound(ahead),
            "estimate": _estimate(ahead),
        }
    return [f"{name}\t{value}" for name, value in shown.items() if value is not None]


def _bound(ahead: AheadInfo) -> str | None:
    if ahead.bound_passes is not None:
        return f"within {ahead.bound_passes} passes"
    return None if ahead.bound_tokens is None else f"at most {ahead.bound_tokens} tokens of others before it"


def _estimate(ahead: AheadInfo) -> str | None:
    if ahead.eta_seconds is None or ahead.tokens_per_second is None:
        return None
    return f"{ahead.eta_seconds:.1f} s at {ahead.tokens_per_second:.0f} tokens/s"
