"""The cases that `make test` leaves out: much time, and little that others do not see."""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from table import DTYPES, ELEMENTWISE

EVERY: dict[str, dict[str, int]] = {
    "autotune": {
        "test_every_kind_of_cell_is_measured": 0,
    },
    "benchmark_mixing": {
        "test_a_part_of_a_run_leaves_other_rows": 0,
        "test_files_are_merged_in_the_order_of_the_cases": 0,
        "test_rows_have_sizes_limits_and_ratios": 0,
    },
    "benchmarks": {
        "test_autos_choice_is_timed_on_fresh_and_trained_layers": 0,
        "test_the_papers_figures_from_the_run_to_the_picture": 0,
    },
    "borders": {
        "test_nothing_crosses_a_border": 37,
    },
    "cache": {
        "test_kernels_with_narrower_vectors_agree_with_the_loop": 0,
    },
    "cell_modes": {
        "test_compiled_code_takes_notice_of_the_mode": 0,
        "test_sizes_in_config_fit_the_layers_own_channels": 0,
    },
    "commands": {
        "test_lm_eval_runs_by_its_own_command_line": 0,
    },
    "context": {
        "test_blocks_are_compiled_with_their_messages": 0,
        "test_ranks_are_one_process": 3,
    },
    "cuda": {
        "test_fields_and_other_dtypes_compile": 0,
        "test_kernels_compile_without_spills": 5,
        "test_kernels_of_matrix_cells_compile": 7,
        "test_kernels_of_steps_that_mix_compile": 4,
        "test_newton_kernels_compile": 0,
        "test_variants_compile": 9,
    },
    "docs": {
        "test_examples_run": 4,
    },
    "emulated": {
        "test_both_solvers": 3,
        "test_channels_that_forget_at_times_meet_soon": 0,
        "test_gaps_of_slow_channels_do_not_accumulate": 0,
        "test_large_weights": 2,
        "test_latches": 3,
        "test_scans_of_a_decay_of_one_row": 0,
        "test_slow_channels_meet_soon": 0,
        "test_slow_segments_pass_small_shifts_to_segments_that_expand": 0,
        "test_the_scale_of_the_loss_scales_gradients": 0,
    },
    "examples": {
        "test_custom_cell": 0,
        "test_digits": 0,
        "test_irregular": 0,
        "test_lora": 0,
        "test_truncated_bptt": 0,
    },
    "final_states": {
        "test_states_can_be_written_and_detached": 5,
    },
    "frozen": {
        "test_cuda_adds_up_no_weights_that_are_frozen": 7,
        "test_engines_are_asked_for_what_is_wanted": 5,
    },
    "fused": {
        "test_any_number_of_channels": 5,
        "test_eight_states_and_no_more": 2,
        "test_kernels_as_shipped": 7,
        "test_random_cells_obey_the_contract": 2,
    },
    "habits_wrappers": {
        "test_aot_inductor": 0,
        "test_compile": 0,
        "test_compile_by_inductor": 2,
        "test_compile_frozen": 2,
        "test_compile_with_lengths": 2,
        "test_compile_with_resets_in_both_directions": 2,
        "test_onnx": 0,
        "test_onnx_any_sizes": 0,
    },
    "hard_cases": {
        "test_empty_batches_and_sequences": 5,
        "test_large_recurrent_weights": 11,
        "test_non_finite_inputs_spread_no_further_than_in_the_loop": 13,
        "test_one_channel_and_odd_lengths": 11,
        "test_steps_that_jump_take_the_states_that_are_returned": 3,
        "test_what_no_step_made_still_has_gradients": 5,
    },
    "head_cells": {
        "test_cells_obey_the_contract": 5,
        "test_tasks_take_them": 3,
    },
    "hooks": {
        "test_compiled_and_exported": 2,
    },
    "launch": {
        "test_cpu_launches_depend_on": 3,
        "test_gradients_arrive_in_any_layout_one_after_the_other": 2,
    },
    "layer": {
        "test_step_by_step_equals_forward": 4,
    },
    "layer_sequences": {
        "test_lengths": 3,
        "test_packed_sequences_of_any_lengths": 0,
    },
    "learn": {
        "test_a_whole_run_of_two_mixers": 0,
    },
    "lm": {
        "test_models_pickle_and_copy": 2,
    },
    "lm_hf": {
        "test_all_ways_give_the_plain_models_logits": 3,
    },
    "lm_hf_training": {
        "test_a_decoding_step_is_one_graph": 0,
        "test_blocks_compile_after_hidden_states_were_returned": 0,
        "test_checkpointing_changes_no_bit": 4,
        "test_compiled_prompts_may_have_positions_and_ask_for_a_cache": 0,
    },
    "lm_recompute": {
        "test_compiled_blocks_store_only_products_and_states": 2,
    },
    "lm_rows": {
        "test_all_ways_give_the_same_logits": 3,
        "test_compiled_blocks_take_rows_of_any_length": 0,
        "test_export_of_padded_rows": 0,
        "test_packed_rows_of_many_lengths_compile_a_few_times": 0,
    },
    "matrix": {
        "test_compilers_see_the_loop": 0,
        "test_narrow_dtypes_are_those_of_inputs": 9,
        "test_solve_is_the_loop": 7,
        "test_zero_is_the_default_start": 5,
    },
    "matrix_emulated": {
        "test_a_wrong_kernel_is_seen": 0,
        "test_forms_of_steps": 0,
        "test_kernels_are_the_loop": 5,
        "test_products": 3,
        "test_steps_of_many_operations": 4,
        "test_training_launches_the_variants_that_are_compiled_ahead": 0,
    },
    "matrix_kernels": {
        "test_a_wrong_kernel_is_seen": 0,
        "test_any_rows_and_steps": 3,
        "test_axes_fill_vectors_or_do_not": 11,
        "test_gates_that_keep_all_or_nothing": 5,
        "test_kernels_are_the_loop": 7,
    },
    "matrix_segments": {
        "test_states_that_depend_on_others_of_fewer_axes": 3,
    },
    "mixing": {
        "test_a_step_without_kernels_has_a_reason": 3,
        "test_graphs_over_rows_are_those_of_symbolic_sizes": 4,
    },
    "mixing_emulated": {
        "test_a_wrong_exchange_is_seen": 0,
        "test_a_wrong_kernel_is_seen": 0,
        "test_frozen_parameters_leave_other_gradients_alone": 0,
        "test_gradients_arrive_at_some_states_only": 0,
        "test_kernels_obey_the_contract": 7,
        "test_kernels_without_a_fault_agree": 0,
        "test_matrices_come_from_memory_where_registers_are_few": 0,
        "test_matrices_in_single_precision_with_gates_in_bfloat16": 0,
        "test_older_gpus_run_the_same_kernels": 0,
        "test_training_launches_the_variants_that_are_compiled_ahead": 0,
        "test_wide_heads_are_sliced_over_a_cluster": 4,
    },
    "mixing_kernels": {
        "test_a_wrong_kernel_is_seen": 0,
        "test_any_length": 3,
    },
    "mixing_layers": {
        "test_export_to_onnx_is_a_scan_of_plain_operators": 0,
    },
    "mutations": {
        "test_mutants_fail": 11,
        "test_mutants_fail_where_rounding_moves_everything": 3,
        "test_mutants_of_mixing_cells_fail": 5,
    },
    "newton_fused": {
        "test_any_number_of_segments": 11,
        "test_slow_gates": 2,
    },
    "onnx": {
        "test_exported_loops_run_in_onnxruntime": 0,
    },
    "op": {
        "test_compile_a_whole_layer": 7,
        "test_compile_fullgraph": 3,
        "test_second_derivatives": 3,
        "test_vmap_over_weights": 5,
    },
    "ops": {
        "test_ops_agree_with_torch": 5,
        "test_written_out_functions_are_accurate": 2,
    },
    "pairs": {
        "test_pairs_that_can_run_a_cell_do": 5,
        "test_pairs_that_can_run_an_unusual_cell_do_and_others_say_which_can": 7,
    },
    "products": {
        "test_a_product_is_that_of_the_block_diagonal_matrix": 3,
    },
    "program": {
        "test_ops_that_keep_shapes_and_mix_channels_are_dense": 0,
    },
    "program_keys": {
        "test_compiled_code_says_that_the_step_has_changed": 0,
        "test_what_a_step_reads_is_followed": 5,
    },
    "properties": {
        "test_gradcheck": 5,
        "test_rows_obey_the_contract": 5,
        "test_rows_of_mixing_cells_obey_the_contract": 19,
        "test_solves_obey_the_contract": 11,
    },
    "readout": {
        "test_compiled_and_exported": 0,
        "test_gradients_reach_all_states_by_every_engine": 3,
        "test_verify_holds_values_and_gradients": 5,
    },
    "recurrent_layer": {
        "test_compiled_checkpointing": 0,
        "test_layers_of_one_shape_share_one_compilation": 0,
    },
    "release": {
        "test_a_model_is_served_in_the_readmes_words": 0,
    },
    "request": {
        "test_compiled_code_follows_the_context": 0,
        "test_compiled_code_follows_the_context_of_the_thread_that_calls": 0,
    },
    "scales": {
        "test_any_unit_has_the_error_of_a_loop": 5,
        "test_kernels_of_mixing_cells_know_no_scale": 5,
        "test_units_of_states_scale_states": 7,
    },
    "scan": {
        "test_compile_what_is_broadcast_reset_and_padded": 2,
        "test_compiled_calls_of_several_kinds": 0,
        "test_dtypes": 2,
        "test_scan_equals_the_loop": 7,
    },
    "split": {
        "test_compiled_code_follows_the_context": 2,
    },
    "steps": {
        "test_forms_are_those_of_pytorch": 4,
    },
    "structure": {
        "test_a_wrong_jacobian_by_hand_changes_no_result": 5,
    },
    "structure_heads": {
        "test_a_head_is_finished_alone": 0,
        "test_a_step_that_mixes_heads_is_refused": 0,
        "test_it_agrees_with_the_dense_structure": 0,
        "test_matrices_that_fit_no_number_of_heads_are_refused": 0,
        "test_solves_and_gradients_hold_the_contract": 5,
    },
    "surrogates": {
        "test_a_function_of_the_users_own_has_its_own_gradient": 5,
    },
    "tasks_models": {
        "test_compiled_steps_are_steps": 2,
    },
    "tasks_run": {
        "test_a_killed_training_goes_on_with_the_same_bits": 3,
    },
    "train": {
        "test_the_demo_runs_with_every_structure": 3,
    },
    "train_lost": {
        "test_a_killed_run_goes_on_with_other_ranks": 2,
    },
    "train_mishaps": {
        "test_a_full_disk_keeps_the_checkpoint_before": 3,
        "test_each_kill_loses_at_most_an_interval_and_changes_no_bit": 0,
        "test_other_files_that_cannot_be_written": 3,
    },
    "train_order": {
        "test_compiled_blocks_are_checked_too": 0,
    },
    "train_sharding": {
        "test_one_goes_on_from_two_and_two_from_one": 0,
    },
    "train_stateful": {
        "test_going_on_changes_no_bit": 4,
        "test_other_ways_to_compute_carry_the_same": 4,
        "test_two_ranks_are_one_and_one_goes_on_from_two": 0,
    },
    "train_stopping": {
        "test_a_signal_saves_and_the_run_goes_on_from_there": 3,
        "test_ranks_stop_in_the_same_step": 0,
    },
    "train_trainer": {
        "test_curves_are_drawn_where_matplotlib_is": 0,
    },
    "zoo": {
        "test_cells_are_the_published_recurrences": 5,
        "test_cells_obey_the_contract": 3,
    },
}
"""By module, without `test_`, and function: one case in how many stays; 0 is none.

The number has no factor in common with the sizes of a table's axes, where it has several, so that
each value of each axis stays.
"""

OF_TWO_DTYPES = ("pairs", "properties", "scales")
"""Modules whose tests compile each elementwise cell for each dtype: `make test`, for two."""


def is_left_out(params: Collection[object]) -> bool:
    """Return True for an elementwise cell in neither float32 nor a second dtype, its own in turn.

    A cell's code knows its dtype only by conversions and functions, which all cells share.
    """
    others = [dtype for dtype in DTYPES if dtype != torch.float32]
    for turn, cell in enumerate(ELEMENTWISE):
        if cell in params:
            second = others[turn % len(others)]
            return any(dtype in params for dtype in others if dtype != second)
    return False


def mark(items: Iterable[pytest.Item], every: Mapping[str, Mapping[str, int]] = EVERY) -> None:
    """Mark as `thorough` the cases that `make test` leaves out, which `make test-all` runs."""
    order: Counter[str] = Counter()
    for item in items:
        module, name = item.path.stem.removeprefix("test_"), item.originalname
        number = every.get(module, {}).get(name)
        if number is None:
            continue
        if module in OF_TWO_DTYPES and is_left_out(item.callspec.params.values()):
            item.add_marker(pytest.mark.thorough)
            continue
        if number == 0 or order[f"{module}.{name}"] % number:
            item.add_marker(pytest.mark.thorough)
        order[f"{module}.{name}"] += 1


def unknown(folder: Path) -> list[str]:
    """Return the names of the table that no module of a folder has."""
    missing = []
    for module, names in EVERY.items():
        tree = ast.parse((folder / f"test_{module}.py").read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing += [f"{module}.{name}" for name in names if name not in functions]
    return missing
