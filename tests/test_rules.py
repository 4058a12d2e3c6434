"""The rules of the numeric core (`docs/explanation/rules.md`), and the tests that hold each of them."""

import re

from tests.support import ROOT

RULES = ROOT / "docs" / "explanation" / "rules.md"

HELD = {
    "R1": [
        "tests/tuning/losses/test_losses_invariance.py::test_losses_of_parts_add_up_to_that_of_the_batch",
        "tests/conformance/test_vectors.py::test_case",
        "tests/tuning/training/test_step.py::test_every_split_into_micro_batches_gives_the_same_step",
        "tests/tuning/algorithms/test_objective.py::test_micro_batches_and_packing_change_nothing",
        "tests/tuning/training/test_mesh.py::test_steps_are_those_of_one_device_on_every_mesh",
    ],
    "R2": [
        "tests/tuning/rollout/engine/test_engine.py::test_recorded_logprobs_equal_the_trainers_at_the_same_temperature",
        "tests/flows/recipe/test_recipe.py::test_combinations_that_cannot_run_are_refused",
    ],
    "R3": [
        "tests/flows/graph/test_graph.py::test_a_rollout_records_the_policy_that_made_it",
        "tests/tuning/rollout/engine/test_engine.py::test_recorded_logprobs_equal_the_trainers_at_the_same_temperature",
        "tests/stages/sampling/test_fleet.py::test_what_an_engine_would_do_otherwise_is_refused",
    ],
    "R4": [
        "tests/tuning/algorithms/test_algorithms.py::test_corrections_between_sampler_and_trainer",
        "tests/tuning/algorithms/test_objective.py::test_with_one_update_only_the_current_policy_is_differentiated",
        "tests/conformance/test_vectors.py::test_case",
    ],
    "R5": [
        "tests/tuning/losses/test_losses_invariance.py::test_masked_junk_changes_nothing",
        "tests/tuning/losses/test_losses_invariance.py::test_tokens_of_infinite_sampler_logprob_leave_both_sides",
        "tests/tuning/losses/test_losses_invariance.py::test_extreme_log_ratios_stay_finite",
    ],
    "R6": [
        "tests/conformance/test_vectors.py::test_case",
    ],
    "R7": [
        "tests/tuning/algorithms/test_algorithms.py::test_aggregation_is_refused_by_the_ratio",
        "tests/conformance/test_vectors.py::test_case",
    ],
    "R8": [
        "tests/tuning/losses/test_losses_invariance.py::test_gradient_of_k1_as_a_loss_is_zero",
        "tests/tuning/losses/test_losses_invariance.py::test_gradient_of_k2_is_exact_and_that_of_k3_is_not",
        "tests/tuning/losses/test_losses_invariance.py::test_straight_through_has_both",
        "tests/tuning/losses/test_losses_invariance.py::test_k1_in_the_reward_gives_the_exact_gradient",
    ],
    "R9": [
        "tests/tuning/losses/test_losses_groups.py::test_failed_samples_leave_every_statistic",
        "tests/tuning/losses/test_losses_groups.py::test_groups_do_not_depend_on_the_batch",
        "tests/tuning/algorithms/test_rounds.py::test_groups_without_variance_and_failed_samples_leave_the_update",
        "tests/stages/sampling/test_groups.py::test_too_few_informative_groups_end_the_round_with_a_histogram",
        "tests/flows/test_rounds.py::test_refills_find_prompts_that_teach_and_every_prompt_is_accounted_for",
    ],
    "R10": [
        "tests/tuning/rollout/engine/test_engine.py::test_completions_end_with_their_eos_or_at_the_limit",
        "tests/tuning/data/test_conversations.py::test_trained_is_what_the_assistant_writes_and_its_end_of_turn",
        "tests/tuning/models/test_tokenizer.py::test_eos_ids",
    ],
    "R11": [
        "tests/tuning/training/test_batch.py::test_packed_logprobs_equal_those_of_each_completion_alone",
        "tests/tuning/training/test_batch.py::test_packed_gradient_equals_the_sum_of_unshared_gradients",
        "tests/conformance/test_families.py::test_packed_rows_equal_rows_of_their_own",
    ],
    "R12": [
        "tests/tuning/training/test_batch.py::test_a_score_does_not_depend_on_its_neighbours",
        "tests/tuning/algorithms/test_algorithms.py::test_the_kl_in_the_reward_lies_on_every_token_and_the_score_on_the_last",
    ],
    "R13": [
        "tests/tuning/training/test_head.py::test_values_and_gradients_equal_the_naive_head",
        "tests/tuning/training/test_head.py::test_a_train_step_needs_no_more_memory_for_a_larger_vocabulary",
        "tests/tuning/training/test_head.py::test_gradients_by_kept_exponentials_are_those_of_logits_that_are_made_again",
    ],
    "R14": [
        "tests/tuning/rollout/engine/test_engine.py::test_recorded_logprobs_equal_the_trainers_at_the_same_temperature",
        "tests/conformance/test_families.py::test_sampler_trainer_and_transformers_agree_on_logprobs",
        "tests/tuning/rollout/engine/test_continuous.py::test_in_fast_products_the_sampler_rounds_as_the_trainer_does",
        "tests/tuning/models/test_lora.py::test_in_fast_products_an_adapter_is_rounded_with_its_kernel_as_what_is_merged",
        "tests/tuning/test_precision.py::test_a_fast_step_is_near_the_exact_one_and_its_weights_stay_float32",
        "tests/tuning/algorithms/test_rounds.py::test_a_sampler_that_disagrees_with_the_trainer_ends_the_round",
        "tests/tuning/algorithms/test_old_logps.py::test_a_gap_past_the_limit_ends_the_round",
    ],
    "R15": [
        "tests/tuning/rollout/engine/test_engine.py::test_a_sample_depends_on_seed_and_counter_only",
        "tests/tuning/rollout/engine/test_continuous.py::test_a_hundred_mixed_requests_get_what_each_gets_alone",
        "tests/faults/test_kill.py::test_a_round_goes_on_from_its_shards_and_a_lost_policy_is_made_again",
    ],
    "R16": [
        "tests/stages/store/test_killed.py::test_a_commit_that_is_killed_leaves_nothing_or_everything",
        "tests/stages/store/test_artifacts.py::test_what_a_killed_commit_left_is_no_part_of_the_next",
        "tests/faults/test_kill.py::test_the_whole_run_is_killed",
        "tests/stages/sampling/test_rounds.py::test_refused_prompts_have_places_and_reasons_and_the_counts_add_up",
        "tests/stages/update/test_outcomes.py::test_a_completion_has_one_fate_and_those_that_were_not_trained_a_reason",
        "tests/flows/test_rounds.py::test_refills_find_prompts_that_teach_and_every_prompt_is_accounted_for",
    ],
    "R17": [
        "tests/stages/store/test_keys.py::test_a_value_without_one_form_is_refused_and_its_place_is_named",
        "tests/stages/contract/test_fingerprint.py::test_what_runs_changes_the_module_that_it_is_in",
        "tests/stages/contract/test_fingerprint.py::test_a_module_of_the_project_that_moves_leaves_every_stage_as_it_was",
        "tests/flows/graph/test_graph.py::test_a_setting_changes_the_keys_of_its_own_stage_alone",
    ],
    "R18": [
        "tests/stages/sampling/test_fleet.py::test_a_stale_server_is_refused_and_both_policies_are_named",
        "tests/stages/sampling/test_fleet.py::test_a_server_that_only_claims_to_have_the_policy_is_found_out",
        "tests/stages/sampling/test_fleet.py::test_answers_of_other_weights_are_thrown_away",
        "tests/stages/sampling/test_native_servers.py::test_a_server_that_keeps_its_old_weights_under_the_new_name_is_found_out",
    ],
    "R19": [
        "tests/tuning/losses/test_losses_invariance.py::test_counts_and_metric_sums_add_up_over_parts",
        "tests/tuning/algorithms/test_algorithms.py::test_quantiles_of_the_ratio_come_from_counts_that_add_up",
    ],
    "R20": [
        "tests/tuning/rewards/test_processes.py::test_what_a_sample_does_to_its_call_costs_that_sample",
        "tests/tuning/parallel/test_pool.py::test_what_a_process_has_started_ends_with_its_crash_and_with_its_deadline",
        "tests/tuning/parallel/test_pool.py::test_a_job_that_is_killed_from_outside_is_tried_three_times",
        "tests/tuning/evaluation/test_answers.py::test_a_pattern_that_never_ends_finds_no_answer",
        "tests/tuning/rewards/test_processes.py::test_what_a_reward_starts_in_its_own_session_ends_with_its_time",
        "tests/tuning/rewards/test_sandbox.py::test_nothing_of_the_caller_is_seen_and_nothing_stays",
    ],
    "R21": [
        "tests/stages/sampling/test_rounds.py::test_each_completion_has_its_own_reward",
        "tests/stages/sampling/test_rounds.py::test_a_journal_that_a_kill_has_left_gives_the_same_scores",
        "tests/stages/sampling/test_rounds.py::test_groups_and_baselines_are_those_of_places",
        "tests/stages/sampling/test_rounds.py::test_tables_of_other_completions_are_refused",
        "tests/flows/report/test_report.py::test_a_prompt_that_a_round_draws_twice_is_shown_with_the_rewards_of_each_place",
        "tests/oracle/test_journal.py::test_rewards_of_another_place_are_found_with_their_round",
    ],
    "R22": [
        "tests/stages/sampling/test_order.py::test_after_any_round_of_a_run_counts_of_prompts_differ_by_at_most_one",
        "tests/stages/sampling/test_order.py::test_each_prompt_is_once_in_a_pass_where_grain_repeats_one",
        "tests/stages/sampling/test_order.py::test_refills_walk_over_an_order_of_their_own_past_what_the_round_has",
        "tests/stages/training/test_examples.py::test_a_prompt_is_never_on_both_sides_and_the_rows_held_out_are_no_slice",
        "tests/tuning/test_random_draws.py::test_some_rows_are_whole_random_groups_and_more_rows_contain_them",
    ],
    "R23": [
        "tests/tuning/data/test_turn_end.py::test_every_completion_ends_with_the_end_of_the_turn",
        "tests/tuning/data/test_turn_end.py::test_the_end_is_what_the_template_writes_first_behind_the_answer",
        "tests/stages/test_export.py::test_the_end_of_a_turn_is_among_the_stop_ids_of_the_export",
        "tests/tuning/data/test_conversations.py::test_trained_is_what_the_assistant_writes_and_its_end_of_turn",
        "tests/tuning/data/test_conversations.py::test_each_turn_is_a_row_with_its_end_where_the_template_writes_none",
        "tests/stages/score/test_score.py::test_the_reward_model_reads_the_end_of_the_turn",
    ],
    "R24": [
        "tests/tuning/algorithms/test_selection.py::test_a_masked_completion_might_as_well_not_be_there",
        "tests/tuning/algorithms/test_selection.py::test_out_of_the_loss_alone_a_reward_counts_in_the_baseline",
        "tests/tuning/algorithms/test_selection.py::test_groups_that_tie_on_the_task_differ_by_their_kl",
        "tests/tuning/algorithms/test_rounds.py::test_a_round_that_ties_on_the_task_trains_on_its_kl",
        "tests/tuning/algorithms/test_rounds.py::test_a_round_that_ties_on_the_task_moves_no_policy_by_whitened_noise",
        "tests/tuning/algorithms/test_rounds.py::test_a_step_that_is_skipped_adapts_nothing",
        "tests/tuning/losses/test_losses_groups.py::test_failed_samples_leave_every_statistic",
        "tests/oracle/test_score.py::test_totals",
        "tests/oracle/test_properties.py::test_tables",
        "tests/oracle/test_rl.py::test_options",
        "tests/oracle/test_properties.py::test_recipes_and_tables",
    ],
    "R25": [
        "tests/stages/score/test_score.py::test_a_judge_that_is_down_and_then_up_leaves_no_trace",
        "tests/stages/score/test_score.py::test_a_stage_that_failures_have_ended_goes_on_when_their_cause_is_gone",
        "tests/tuning/rewards/test_processes.py::test_an_outage_is_no_verdict_and_the_others_are_scored",
        "tests/tuning/rewards/test_processes.py::test_a_verdict_that_lacks_is_the_samples_failure_if_the_service_judges_others",
        "tests/stages/update/test_outcomes.py::test_a_round_that_teaches_nothing_says_why",
    ],
    "R26": [
        "tests/flows/graph/test_graph.py::test_a_key_holds_the_content_of_the_parts_that_are_read",
        "tests/flows/graph/test_graph.py::test_what_is_computed_is_of_one_kind_of_device",
        "tests/flows/test_edits.py::test_a_reward_that_is_edited_is_what_the_next_score_is_made_by",
        "tests/flows/test_edits.py::test_an_input_that_was_replaced_meanwhile_is_the_one_of_the_key_or_refused",
        "tests/flows/test_edits.py::test_what_a_key_says_and_the_worker_does_not_have_is_refused",
        "tests/stages/contract/test_sources.py::test_a_function_that_gives_records_is_content_with_what_it_imports",
        "tests/stages/contract/test_sources.py::test_packages_that_a_users_code_imports_are_content",
        "tests/stages/worker/test_worker.py::test_it_starts_with_the_first_request_and_makes_an_artifact",
    ],
    "R27": [
        "tests/tuning/algorithms/test_trajectories.py::test_rows_of_a_trajectory_change_no_gradient",
        "tests/tuning/losses/test_losses_invariance.py::test_masked_junk_changes_nothing",
        "tests/tuning/losses/test_losses_invariance.py::test_gae_over_holes_is_that_of_a_plain_loop",
        "tests/tuning/algorithms/test_trajectories.py::test_a_failed_episode_leaves_everything_and_a_limit_goes_on",
        "tests/oracle/test_turns.py::test_trajectories",
        "tests/stages/sampling/test_episodes.py::test_the_trained_ids_are_the_sampled_ids_and_nothing_else_is",
        "tests/stages/sampling/test_episodes.py::test_limits_have_statuses_of_their_own",
        "tests/tuning/chat/test_renderer.py::test_sampled_ids_stay_and_all_ids_read_as_the_whole_rendering",
    ],
    "R28": [
        "tests/stages/auditing/test_laws.py::test_what_an_artifact_says_otherwise_breaks_a_law",
        "tests/tuning/algorithms/test_routing.py::test_with_a_replay_the_mismatch_is_rounding_and_a_round_comes_again_to_the_bit",
    ],
    "R29": [
        "tests/conformance/test_vectors.py::test_case",
        "tests/conformance/test_families.py::test_logits_and_gradients_equal_transformers",
        "tests/tuning/test_precision.py::test_float32_is_exact_in_every_product_of_a_step",
        "tests/oracle/test_rl.py::test_every_algorithm",
        "tests/oracle/test_fit.py::test_sft",
        "tests/oracle/test_fit.py::test_reward_model",
        "tests/oracle/test_fit.py::test_preference_on_pairs",
        "tests/flows/cli/test_export.py::test_export_verify_compares_with_transformers",
    ],
    "R30": [
        "tests/tuning/training/test_mesh.py::test_steps_are_those_of_one_device_on_every_mesh",
        "tests/tuning/training/test_mesh.py::test_two_processes_train_one_model",
        "tests/tuning/rollout/engine/test_meshes.py::test_samples_are_those_of_one_device",
        "tests/tuning/rollout/engine/test_meshes.py::test_a_batch_comes_again_to_the_bit_and_compiles_nothing",
        "tests/stages/update/test_kept.py::test_losses_and_parameters_are_those_of_one_device",
    ],
    "R31": [
        "tests/stages/serving/test_rendering.py::test_a_conversation_is_trained_and_served_as_its_template_writes_it",
        "tests/stages/serving/test_field_chats.py::test_one_answer_is_one_text_in_chats_pairs_and_labels",
    ],
    "R32": [
        "tests/tuning/data/test_records.py::test_errors_name_record_and_field",
        "tests/tuning/data/test_records.py::test_a_number_as_id_group_or_answer_is_its_json_text_in_every_layout",
        "tests/tuning/data/test_records.py::test_a_cell_of_csv_is_json_only_where_it_holds_messages_or_answers",
        "tests/tuning/rewards/test_processes.py::test_a_reward_is_a_number_and_no_text_with_digits_nor_the_keys_of_a_mapping",
    ],
    "R33": [
        "tests/stages/store/test_keys.py::test_a_setting_is_in_the_key_unless_it_says_how_to_compute",
        "tests/flows/graph/test_keying.py::test_a_variable_of_jax_or_xla_changes_the_keys_of_what_computes_alone",
        "tests/stages/contract/test_sources.py::test_a_function_that_gives_records_is_content_with_what_it_imports",
        "tests/stages/contract/test_sources.py::test_a_helper_without_a_version_of_its_content_counts_by_that",
    ],
    "R34": [
        "tests/tuning/algorithms/test_authors.py::test_a_token_weighs_what_it_weighs_in_the_authors_code",
        "tests/tuning/algorithms/test_authors.py::test_kl_cov_and_clip_cov_are_the_authors",
        "tests/tuning/algorithms/test_authors.py::test_vespo_weighs_a_completion_as_trl_does",
    ],
    "R35": [
        "tests/tuning/algorithms/test_authors.py::test_a_kl_without_a_weight_is_the_limit_of_one_with_little",
        "tests/tuning/algorithms/test_selection.py::test_tied_groups_count_whatever_the_weight_of_the_kl",
    ],
    "R36": [
        "tests/stages/store/test_collect.py::test_a_run_that_starts_during_a_collection_keeps_what_it_has_found",
        "tests/stages/store/test_collect.py::test_a_collection_that_has_lost_its_lease_removes_nothing_more",
        "tests/faults/test_storm.py::test_every_scene_of_a_small_storm_ends_as_a_run_that_nobody_disturbs",
    ],
}
"""The tests of each rule. The page names what is not tested."""


def test_every_rule_is_held_by_a_test_or_the_page_says_what_is_not_tested():
    rules = {text.split(".")[0]: text for text in re.split(r"^## (?=R\d)", RULES.read_text(), flags=re.MULTILINE)[1:]}
    assert list(rules) == [f"R{number}" for number in range(1, len(rules) + 1)]
    assert {name for name, text in rules.items() if "**Not tested:**" not in text} <= HELD.keys() <= rules.keys()


def test_the_tests_of_the_rules_exist():
    for file, name in (test.split("::") for tests in HELD.values() for test in tests):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"no {file}::{name}"
