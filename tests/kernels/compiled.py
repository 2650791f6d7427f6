"""Compiles the kernels for a GPU that need not be there, and prints what the machine code accesses: ``{kernel: {variant: accesses}}``.

A program of its own (``python -m tests.kernels.compiled``), because a process either compiles kernels or interprets them.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

#: Compute capabilities: A100 and H100.
CAPABILITIES = (80, 90)
#: Width of a word in the kernel's terms, words in a page.
PAGES = {"16-byte": ("*i64", 27648 * 64 // 8), "small 16-byte": ("*i64", 64), "8-byte": ("*i64", 3457), "4-byte": ("*i32", 1001),
         "1-byte": ("*u8", 21), "tables only": ("*i64", 0)}  # fmt: skip

PART_KERNELS = ("plan_part_one_block", "count_part_blocks", "match_part_blocks", "list_part_blocks")


def main() -> None:
    warnings.simplefilter(
        "ignore"
    )  # Triton announces other defaults for floating point, of which there is none here
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from allocator.kernels import move, part_plan, plan

    def accesses(
        kernel: Any, constants: dict[str, Any], pointers: dict[str, str], capability: int, warps: int
    ) -> list[str]:
        types = {"new_ok": "*u8", "ok": "*u8", "is_void": "*u8", **pointers}
        numbers = (
            "num_holes",
            "mark",
            "extent",
            "window",
            "rows",
            "low",
            "high",
            "call",
            "fault",
            "num_blocks",
            "num_virtual_pages",
            "num_written",
            "page_size",
        )
        signature, given, alignment = {}, {}, {}
        for at, name in enumerate(parameter.name for parameter in kernel.params):
            if name in constants:
                signature[name], given[(at,)] = "constexpr", constants[name]
            else:
                signature[name] = types.get(name, "i32" if name in numbers else "*i64")
            if name == "words":
                alignment[(at,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=alignment)
        made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        return sorted(set(re.findall(r"(?:ld|st)\.global[.\w:]*", made.asm["ptx"])))

    found: dict[str, dict[str, list[str]]] = {}
    for capability in CAPABILITIES:
        for grows_up in (True, False):
            for on_device in (True, False):
                constants = {"GROWS_UP": grows_up, "MARK_ON_DEVICE": on_device, "EXTENT_ON_DEVICE": on_device,
                             "BLOCK": plan.BLOCK, "SUMS": plan.SUMS}  # fmt: skip
                pointers = {"mark": "*i64", "extent": "*i64"} if on_device else {}
                for kernel in (plan.plan_one_block, plan.count_blocks, plan.match_blocks):
                    variant = f"sm_{capability}, {'up' if grows_up else 'down'}, {'device' if on_device else 'host'}"
                    found.setdefault(kernel.__name__, {})[variant] = accesses(
                        kernel, constants, pointers, capability, 4
                    )
            for name in PART_KERNELS:
                constants = {"GROWS_UP": grows_up, "BLOCK": plan.BLOCK, "SUMS": plan.SUMS}
                found.setdefault(name, {})[f"sm_{capability}, {'up' if grows_up else 'down'}"] = accesses(
                    getattr(part_plan, name), constants, {"mark": "*i64"}, capability, 4
                )
        for name, (word, page_words) in PAGES.items():
            chunk = move.chunk_for(page_words)
            constants = {"PAGE_WORDS": page_words, "CHUNK": chunk, "ROWS": move.ROWS}
            found.setdefault("move_pages", {})[f"sm_{capability}, {name}"] = accesses(
                move.move_pages, constants, {"words": word}, capability, move.warps_for(chunk)
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
