//! The guests of the matrix: one line each. `for_each_guest!` passes the lines to another macro,
//! which makes a test of each; [`GUESTS`] is the same list as data.
//!
//! Arguments are chosen so that a run takes at most about 10 ms natively: the interpreter is up to
//! 100 times slower, and each guest runs in every mode.

use crate::build::Guest;

/// Calls `$then! { name: "source" .method(argument)…, … }` with all guests.
#[macro_export]
macro_rules! for_each_guest {
    ($then:ident) => {
        $then! {
            // Control flow.
            recursion: "recursion.c" .args(&["14"]),
            recursion_unoptimised: "recursion.c" .args(&["12"]) .flags(&["-O0"]),
            indirect_calls: "indirect_calls.c",
            jump_tables: "jump_tables.c",
            setjmp: "setjmp.c" .exits(7),
            coroutines: "coroutines.c",
            tail_calls: "tail_calls.c",
            call_tricks: "call_tricks.c",
            computed_goto: "computed_goto.c",
            indirect_jumps: "indirect_jumps.c",
            signals_in_calls: "signals_in_calls.c",
            interpreted_loops: "interpreted_loops.c",
            interpreted_loops_unoptimised: "interpreted_loops.c" .args(&["800"]) .flags(&["-O0"]),
            interpreted_calls: "interpreted_calls.c",
            interpreted_calls_long: "interpreted_calls.c" .args(&["24"]) .flags(&["-O1"]),
            bytecode: "bytecode.c",
            bytecode_unoptimised: "bytecode.c" .args(&["150"]) .flags(&["-O0"]),
            deep_recursion: "deep_recursion.c",
            alloca: "alloca.c",
            varargs: "varargs.c",
            random_code: "random_code.c" .args(&["1", "8"]) .flags(&["-mno-red-zone"]),
            // Signals and faults.
            segv_mprotect: "segv_mprotect.c",
            segv_ucontext: "segv_ucontext.c" .flags(&["-mno-red-zone"]),
            fpe_skip: "fpe_skip.c",
            sigill: "sigill.c" .exits(4),
            siglongjmp: "siglongjmp.c",
            sigaltstack: "sigaltstack.c",
            sig_nested: "sig_nested.c" .dies(15),
            itimer_loop: "itimer_loop.c",
            eintr: "eintr.c",
            sigsuspend: "sigsuspend.c",
            sigchld: "sigchld.c",
            signal_storm: "signal_storm.c",
            signal_state: "signal_state.c" .flags(&["-mno-red-zone"]),
            signals_faults: "signals_faults.c" .flags(&["-mno-red-zone"]),
            syscall_extremes: "syscall_extremes.c",
            string_faults: "string_faults.c" .flags(&["-mno-red-zone"]),
            signals_calls: "signals_calls.c",
            signals_restart: "signals_restart.c",
            enter_word: "enter_word.c" .flags(&["-mno-red-zone"]),
            signalfd_faults: "signalfd_faults.c" .flags(&["-pthread"]),
            signalfd_busy: "signalfd_busy.c",
            signalfd_threads: "signalfd_threads.c" .flags(&["-pthread"]),
            signals_context: "signals_context.c" .flags(&["-mno-red-zone"]),
            signals_stack: "signals_stack.c",
            signals_timers: "signals_timers.c",
            signals_children: "signals_children.c",
            signals_terminal: "signals_terminal.c",
            signals_everything: "signals_everything.c",
            signals_step: "signals_step.c" .flags(&["-mno-red-zone"]),
            signals_threads: "signals_threads.c" .flags(&["-pthread"]),
            job_control: "job_control.c",
            jobs: "jobs.sh" .exits(9),
            sigpipe: "sigpipe.c" .dies(13),
            red_zone: "red_zone.c",
            // Threads.
            threads: "threads.c" .flags(&["-pthread"]),
            threads_static: "threads.c" .flags(&["-pthread", "-static"]),
            threads_unoptimised: "threads.c" .flags(&["-pthread", "-O0"]),
            threads_many: "threads_many.c" .args(&["64", "600"]) .flags(&["-pthread"]),
            threads_main_returns: "threads_exit.c" .args(&["main_returns"]) .flags(&["-pthread"])
                .exits(21),
            threads_main_first: "threads_exit.c" .args(&["main_first_then_exit"])
                .flags(&["-pthread"]) .exits(22),
            threads_main_first_return: "threads_exit.c" .args(&["main_first_then_return"])
                .flags(&["-pthread"]),
            threads_exit: "threads_exit.c" .args(&["thread_exits"]) .flags(&["-pthread"])
                .exits(23),
            threads_exit_group: "threads_exit.c" .args(&["thread_exits_while_main_sleeps"])
                .flags(&["-pthread"]) .exits(24),
            threads_abort: "threads_exit.c" .args(&["thread_aborts"]) .flags(&["-pthread"])
                .dies(6),
            threads_crash: "threads_exit.c" .args(&["thread_crashes"]) .flags(&["-pthread"])
                .dies(11),
            threads_signals: "threads_signals.c" .flags(&["-pthread"]),
            tid_address: "tid_address.c" .flags(&["-pthread"]),
            threads_robust: "threads_robust.c" .flags(&["-pthread"]),
            threads_fork: "threads_fork.c" .flags(&["-pthread"]) .exits(13),
            threads_memory: "threads_memory.c" .flags(&["-pthread"]),
            threads_code: "threads_code.c" .args(&["15"]) .flags(&["-pthread"]),
            threads_stack: "threads_stack.c" .args(&["recover"]) .flags(&["-pthread"]),
            threads_stack_dies: "threads_stack.c" .flags(&["-pthread"]) .dies(11),
            threads_async: "threads_async.cpp" .flags(&["-pthread"]),
            threads_rust: "threads_rust.rs",
            clone_vm: "clone_vm.c" .exits(29),
            leak_sanitizer: "leak_sanitizer.c" .flags(&["-fsanitize=leak"]) .exits(23),
            leak_sanitizer_threads: "leak_sanitizer_threads.c"
                .flags(&["-fsanitize=leak", "-pthread"]) .exits(23),
            threads_stress: "threads_stress.c" .args(&["1", "100", "6"]) .flags(&["-pthread"]),
            // Integer instructions; their flags are read by pushf, which must not meet a red zone.
            flags_alu: "flags_alu.c" .flags(&["-mno-red-zone"]),
            flags_shift: "flags_shift.c" .flags(&["-mno-red-zone"]),
            flags_register: "flags_register.c" .flags(&["-mno-red-zone"]),
            muldiv: "muldiv.c" .flags(&["-mno-red-zone"]),
            carry_chains: "carry_chains.c" .flags(&["-mno-red-zone"]),
            bit_operations: "bit_operations.c" .flags(&["-mno-red-zone"]),
            partial_registers: "partial_registers.c" .flags(&["-mno-red-zone"]),
            string_instructions: "string_instructions.c" .flags(&["-mno-red-zone"]),
            locked: "locked.c" .flags(&["-mno-red-zone"]),
            unaligned: "unaligned.c" .flags(&["-mno-red-zone"]),
            tsc_cpuid: "tsc_cpuid.c",
            // Floating point and vectors.
            sse: "sse.c" .flags(&["-mno-red-zone"]),
            avx: "avx.c" .flags(&["-mno-red-zone"]),
            avx512: "avx512.c" .flags(&["-mno-red-zone"]),
            x87: "x87.c" .flags(&["-mno-red-zone"]),
            x87_pointer: "x87_pointer.c",
            mmx: "mmx.c",
            mxcsr: "mxcsr.c",
            floating: "floating.c" .flags(&["-lm"]),
            floating_unoptimised: "floating.c" .args(&["20"]) .flags(&["-O0", "-lm"]),
            // Algorithms.
            sorting: "sorting.c",
            scalar_memory: "scalar_memory.c" .flags(&["-O0", "-lm"]),
            sorting_unoptimised: "sorting.c" .args(&["200"]) .flags(&["-O0"]),
            sorting_vectorised: "sorting.c" .flags(&["-O3", "-mavx2"]) .args(&["500"]),
            prefix_skips: "prefix_skips.c",
            short_loops: "short_loops.c" .flags(&["-mno-red-zone"]),
            short_loops_unoptimised: "short_loops.c" .flags(&["-O0", "-mno-red-zone"]),
            back_edges: "back_edges.c" .flags(&["-pthread"]),
            branching_loops: "branching_loops.c" .args(&["150000"]),
            branching_loops_unoptimised: "branching_loops.c" .args(&["75000"]) .flags(&["-O0"]),
            hashing: "hashing.c",
            digests: "digests.c" .flags(&["-lm"]),
            digests_static: "digests.c" .flags(&["-static", "-lm"]) .args(&["500"]),
            // Processes, memory and files.
            fork_tree: "fork_tree.c",
            alone: "alone.c",
            tables: "tables.c",
            alone_counts: "alone.c" .args(&["10000", "count"]),
            vfork_exec: "vfork_exec.c" .exits(11),
            executables_of_others: "executables_of_others.c" .flags(&["-pthread"]),
            posix_spawn: "posix_spawn.c",
            traced_vfork: "traced_vfork.c",
            mmap: "mmap.c",
            brk: "brk.c",
            brk_no_pie: "brk.c" .flags(&["-no-pie"]),
            stack_limit: "stack_limit.c" .flags(&["-pthread"]) .exits(5),
            low_break: "low_break.c" .flags(&["-no-pie"]),
            shared_code: "shared_code.c" .flags(&["-pthread"]),
            gaps: "gaps.c",
            gaps_static: "gaps.c" .flags(&["-static"]),
            gaps_high: "gaps.c" .flags(&["-static", "-Wl,-Ttext-segment=0x3f000000"]),
            executable_stack: "executable_stack.c" .flags(&["-Wno-dangling-pointer"]),
            fixed_mappings: "fixed_mappings.c" .flags(&["-pthread"]),
            fixed_mappings_threads: "fixed_mappings.c" .args(&["3"]) .flags(&["-pthread"]),
            shared_memory: "shared_memory.c" .flags(&["-pthread"])
                .args(&["{dir}/shared_memory.tmp"]),
            address_limit: "address_limit.c" .flags(&["-pthread"]),
            io_uring: "io_uring.c",
            int80: "int80.c" .flags(&["-no-pie", "-mno-red-zone"]) .exits(7),
            int80_structures: "int80_structures.c" .flags(&["-no-pie", "-mno-red-zone"]),
            seccomp: "seccomp.c" .flags(&["-pthread"]),
            userfault: "userfault.c" .flags(&["-pthread"]),
            clone_flags: "clone_flags.c",
            exec_privileges: "exec_privileges.c",
            jail: "jail.c" .flags(&["-static"]),
            exec_errors: "exec_errors.c",
            tls: "tls.c",
            files: "files.c",
            large_output: "large_output.c",
            jit_code: "jit_code.c",
            not_executable: "not_executable.c",
            segment_overrides: "segment_overrides.c",
            gs_operands: "gs_operands.c" .flags(&["-mno-red-zone"]),
            gs_base: "gs_base.c",
            call_sites: "call_sites.c" .flags(&["-pthread"]),
            call_sites_short: "call_sites_short.c" .flags(&["-pthread"]),
            call_sites_any: "call_sites_any.c" .flags(&["-pthread"]),
            calls_sampled: "calls_sampled.c" .flags(&["-pthread"]) .args(&["10"]),
            vsyscall: "vsyscall.c" .flags(&["-mno-red-zone"]),
            return_slots: "return_slots.c" .flags(&["-mno-red-zone"]),
            calls_noncanonical: "calls_noncanonical.c" .flags(&["-mno-red-zone"]),
            jumps_noncanonical: "jumps_noncanonical.c",
            jumps_noncanonical_ticks: "jumps_noncanonical.c" .args(&["ticks"]),
            refused: "refused.c",
            self_modifying: "self_modifying.c",
            code_writes: "code_writes.c" .args(&["{dir}/code_writes.tmp"])
                .flags(&["-mno-red-zone"]),
            code_many: "code_many.c" .args(&["1500"]),
            code_many_flipping: "code_many.c" .args(&["500", "flip"]),
            code_recycled: "code_recycled.c" .args(&["1000"]),
            code_outputs: "code_outputs.c" .flags(&["-pthread"]),
            guarded_calls: "guarded_calls.c",
            lods_fault: "lods_fault.c",
            code_versions: "code_versions.c",
            execute_only: "execute_only.c",
            protection_keys: "protection_keys.c" .flags(&["-pthread"]),
            own_code: "own_code.c" .flags(&["-static", "-pthread"]),
            code_protections_same: "code_protections.c" .args(&["150", "0"]) .flags(&["-pthread"]),
            code_protections_refused: "code_protections.c" .args(&["150", "1"])
                .flags(&["-pthread"]),
            code_protections_moved: "code_protections.c" .args(&["150", "2"]) .flags(&["-pthread"]),
            code_protections_advised: "code_protections.c" .args(&["150", "3"])
                .flags(&["-pthread"]),
            code_protections_single: "code_protections.c" .args(&["150", "4"])
                .flags(&["-pthread"]),
            code_threads: "code_threads.c" .args(&["25"]) .flags(&["-pthread"]),
            code_neighbours: "code_neighbours.c" .args(&["100"]) .flags(&["-pthread"]),
            code_behind_calls: "code_behind_calls.c" .args(&["1000"]) .flags(&["-pthread"]),
            code_addresses: "code_addresses.c" .args(&["1"]) .flags(&["-pthread"]),
            constant_slots: "constant_slots.c" .flags(&["-pthread"]),
            word_jumps: "word_jumps.c" .flags(&["-pthread", "-Wl,-z,lazy"]),
            dlopen_loop: "dlopen_loop.c" .args(&["{dir}/libdlopen_loop.so", "40"])
                .flags(&["-rdynamic"]) .library("dlopen_library.c"),
            dlopen: "dlopen.c" .args(&["{dir}/libdlopen.so"]) .flags(&["-rdynamic"])
                .library("dlopen_library.c"),
            script: "script.sh" .args(&["one", "two words"]) .stdin(b"alpha beta \
gamma\ndelta\n") .exits(12),
            // Forms of executables, and what a program finds at its start.
            start_pie: "echo_args.c" .args(&["a", "", "b c", "\u{e9}"]) .exits(5),
            start_no_pie: "echo_args.c" .flags(&["-no-pie"]) .exits(1),
            inherited: "inherited.c" .flags(&["-mno-red-zone"]),
            inherited_changed: "inherited.c" .flags(&["-mno-red-zone"])
                .args(&["under", "{dir}/inherited_changed"]),
            start_lowest: "echo_args.c" .args(&["x"])
                .flags(&["-no-pie", "-Wl,-Ttext-segment=0x10000"]) .exits(2),
            start_in_cache: "echo_args.c" .args(&["x"])
                .flags(&["-no-pie", "-Wl,-Ttext-segment=0x20000000"]) .exits(2),
            start_above_cache: "echo_args.c" .args(&["x"])
                .flags(&["-static", "-Wl,-Ttext-segment=0x70000000"]) .exits(2),
            start_high: "asm_hello.S" .flags(&["-Wl,-Ttext-segment=0x100000000"]) .exits(42),
            start_highest: "asm_hello.S" .flags(&["-Wl,-Ttext-segment=0x7fff00000000"]) .exits(42),
            start_static: "echo_args.c" .args(&["x"]) .flags(&["-static"]) .exits(2),
            start_static_pie: "echo_args.c" .args(&["x", "y"]) .flags(&["-static-pie"]) .exits(3),
            // Other languages.
            exceptions: "exceptions.cpp" .exits(33),
            virtual_calls: "virtual_calls.cpp",
            streams: "streams.cpp" .stdin(b"the cat and the dog and the bird\nthe end\n") .exits(3),
            collections: "collections.rs" .exits(17),
            // Programs without a C library: small enough for single-stepping.
            asm_hello: "asm_hello.S" .exits(42),
            asm_sieve: "asm_sieve.S",
            asm_calls: "asm_calls.S" .exits(1),
            asm_flags: "asm_flags.S",
            asm_strings: "asm_strings.S",
            asm_signal: "asm_signal.S" .exits(5),
            asm_memory: "asm_memory.S" .exits(23),
            asm_vector: "asm_vector.S",
            // Ends of all kinds.
            crash_null: "crash.c" .args(&["null"]) .dies(11),
            crash_hot_loop: "crash.c" .args(&["hot"]) .dies(11),
            crash_call: "crash.c" .args(&["call"]) .dies(11),
            crash_data: "crash.c" .args(&["data"]) .dies(11),
            crash_stack: "crash.c" .args(&["stack"]) .dies(11),
            crash_privileged: "crash.c" .args(&["privileged"]) .dies(11),
            crash_after_handler: "crash.c" .args(&["handler"]) .dies(11),
            crash_blocked: "crash.c" .args(&["blocked"]) .dies(11),
            crash_abort: "crash.c" .args(&["abort"]) .dies(6),
            crash_divide: "crash.c" .args(&["divide"]) .dies(8),
            crash_ud2: "crash.c" .args(&["ud2"]) .dies(4),
            crash_int3: "crash.c" .args(&["int3"]) .dies(5),
            crash_bus: "crash.c" .args(&["bus"]) .dies(7),
            killed: "crash.c" .args(&["kill"]) .dies(9),
            killed_real_time: "crash.c" .args(&["rt"]) .dies(64),
            exit_status: "crash.c" .args(&["exit", "300"]) .exits(44),
            exit_thread: "crash.c" .args(&["syscall_exit", "78"]) .exits(78),
        }
    };
}

macro_rules! as_data {
    ($($name:ident: $source:literal $(.$method:ident($argument:expr))*,)*) => {
        /// All guests, in the order of their declaration.
        pub const GUESTS: &[Guest] = &[
            $(Guest::new(stringify!($name), $source)$(.$method($argument))*,)*
        ];
    };
}

for_each_guest!(as_data);

/// The guest with this name.
pub fn guest(name: &str) -> Option<&'static Guest> {
    GUESTS.iter().find(|guest| guest.name == name)
}
