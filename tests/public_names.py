"""What completion shows of each class: what is new is added here, or to the class's ``_inner``."""

from __future__ import annotations

PUBLIC: dict[str, str] = {
    "Collector": """
        async_shutdown cascade_execute check_finite disable_profile enable_profile env env_plan episodes
        exploration_type fake_tensordict frames_per_batch get_distant_attr get_model get_policy_version
        getattr_env getattr_policy getattr_rb increment_version init_random_frames is_running iterator map_fn
        next partial_batch pause policy policy_plan policy_version post_collect_hook postproc pre_collect_hook
        reading replay_buffer report requested_frames_per_batch reset reset_at_each_iter return_same_td rollout set_seed
        shutdown start stats total_frames trace update_policy_weights_
    """,
    "MultiSyncCollector": """
        async_shutdown cascade_execute check_finite enable_profile env_plan episodes frames_per_batch
        get_distant_attr get_model get_policy_version getattr_env getattr_policy getattr_rb increment_version
        init_random_frames is_running iterator map_fn next num_envs num_workers partial_batch pause policy
        policy_plan policy_version post_collect_hook postproc pre_collect_hook reading receive_weights replay_buffer
        report requested_frames_per_batch reset send_weights set_seed shutdown start stats total_frames trace
        update_at_each_batch update_policy_weights_
    """,
    "MultiAsyncCollector": """
        async_shutdown cascade_execute check_finite enable_profile env_plan episodes frames_per_batch
        get_distant_attr get_model get_policy_version getattr_env getattr_policy getattr_rb increment_version
        init_random_frames is_running iterator map_fn next num_envs num_workers partial_batch pause policy
        policy_plan policy_version post_collect_hook postproc pre_collect_hook reading receive_weights replay_buffer
        report requested_frames_per_batch reset send_weights set_seed shutdown start stats total_frames trace
        update_at_each_batch update_policy_weights_
    """,
    "AsyncBatchedCollector": """
        async_shutdown cascade_execute check_finite disable_profile enable_profile env env_plan episodes
        exploration_type fake_tensordict frames_per_batch get_distant_attr get_model get_policy_version
        getattr_env getattr_policy getattr_rb increment_version init_random_frames is_running iterator map_fn
        next partial_batch pause policy policy_plan policy_version post_collect_hook postproc pre_collect_hook
        reading replay_buffer report requested_frames_per_batch reset reset_at_each_iter return_same_td rollout set_seed
        shutdown start stats total_frames trace update_policy_weights_
    """,
    "DistributedCollector": """
        async_shutdown cascade_execute check_finite env_plan episodes frames_per_batch get_distant_attr
        get_model get_policy_version getattr_env getattr_policy getattr_rb increment_version
        init_random_frames is_running iterator map_fn next num_nodes num_workers partial_batch pause policy
        policy_plan policy_version post_collect_hook postproc pre_collect_hook reading receive_weights replay_buffer
        report requested_frames_per_batch reset send_weights set_seed shutdown start stats total_frames trace
        update_after_each_batch update_policy_weights_
    """,
    "Evaluator": """
        evaluate extract_weights pending poll set_seed shutdown stats trigger_eval wait
    """,
    "TensorDictReplayBuffer": """
        add append_transform attach batch_size can_sample dim_extend dump dumps empty extend insert_transform
        load loads next num_sampled priority_key rate_limiter sample sampler save set_ set_at_ set_rng
        set_sampler set_storage set_writer share stats storage transform update_ update_priority
        update_tensordict_priority write_count writer
    """,
    "LazyTensorStorage": """
        clear device get max_size ndim set shape share
    """,
    "LazyMemmapStorage": """
        clear device folder get max_size ndim set shape share
    """,
    "ListStorage": """
        clear get max_size ndim set shape
    """,
    "GymEnv": """
        action_key action_keys action_spec add_truncated_keys append_transform batch_dims batch_locked
        batch_size bind bind_rows categorical_action_encoding check_state_dict close device done_key done_keys
        done_keys_groups done_spec env env_name fake_tensordict full_action_spec full_done_spec
        full_observation_spec full_reward_spec full_state_spec input_spec is_closed maybe_reset ndim
        ndimension numel observation_keys observation_spec output_spec rand_action rand_step reset reset_keys
        resets_single_envs reward_key reward_keys reward_spec rollout set_seed shape specs state_keys
        state_spec step step_and_maybe_reset step_mdp
    """,
    "SerialEnv": """
        action_key action_keys action_spec add_truncated_keys append_transform batch_dims batch_locked
        batch_size bind bind_rows categorical_action_encoding check_state_dict close device done_key done_keys
        done_keys_groups done_spec fake_tensordict full_action_spec full_done_spec full_observation_spec
        full_reward_spec full_state_spec input_spec is_closed maybe_reset ndim ndimension num_workers numel
        observation_keys observation_spec output_spec rand_action rand_step reset reset_keys
        resets_single_envs reward_key reward_keys reward_spec rollout set_seed shape specs state_keys
        state_spec step step_and_maybe_reset step_mdp update_kwargs
    """,
    "ParallelEnv": """
        action_key action_keys action_spec add_truncated_keys append_transform batch_dims batch_locked
        batch_size bind bind_rows check_state_dict close device done_key done_keys done_keys_groups done_spec
        fake_tensordict full_action_spec full_done_spec full_observation_spec full_reward_spec full_state_spec
        input_spec is_closed maybe_reset ndim ndimension num_envs num_processes num_workers numel
        observation_keys observation_spec output_spec rand_action rand_step reset reset_keys
        resets_single_envs reward_key reward_keys reward_spec rollout set_seed shape specs state_keys
        state_spec step step_and_maybe_reset step_mdp update_kwargs
    """,
    "TransformedEnv": """
        action_key action_keys action_spec add_truncated_keys append_transform base_env batch_dims
        batch_locked batch_size bind bind_rows check_state_dict close device done_key done_keys
        done_keys_groups done_spec fake_tensordict full_action_spec full_done_spec full_observation_spec
        full_reward_spec full_state_spec input_spec insert_transform is_closed maybe_reset ndim ndimension
        numel observation_keys observation_spec output_spec rand_action rand_step reset reset_keys
        resets_single_envs reward_key reward_keys reward_spec rollout set_seed shape specs state_keys
        state_spec step step_and_maybe_reset step_mdp transform
    """,
    "InferenceServer": """
        client clients device get_model in_keys is_alive max_batch_size min_batch_size model output_device
        policy_device policy_plan policy_version policy_version_key service_backend shutdown start stats
        timeout transport update_model update_policy_weights_ weight_sync
    """,
    "InferenceClient": """
        close is_shared submit
    """,
}
