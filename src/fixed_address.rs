//! The start of a command at a fixed address: what it defines before the C library does.
//!
//! `build.rs` decides whether the command is linked that way. It also compiles this file into the
//! small program with which it tries that, so the file depends on nothing else of the command.
//!
//! *The C library's start-up.* A static program starts with `__libc_start_main`, which asks the
//! processor for its features and the sizes of its caches: some sixty times `cpuid`, to choose among
//! ways of copying and searching memory. In a virtual machine each `cpuid` leaves the machine; all
//! take 0.2 ms (measured), a fifth of a short program's time. So `__libc_start_main` below does
//! what glibc's does, without that. Functions that glibc chooses by features are then those for
//! every processor, whose constants are defined here. What start-up consists of changes with glibc's
//! versions: only under the cfg `own_start` is it replaced, which `build.rs` sets for versions whose
//! start-up is known to be this one (source: glibc 2.36, csu/libc-start.c, static case).
//!
//! Invariant: until thread-local storage is set up, nothing here may use it, nor a function that
//! glibc chooses by features before `choose_functions` has run.
//!
//! Called once, by `_start`, in the only thread.

/// What functions do that glibc calls only if something else in the program needs them.
#[unsafe(no_mangle)]
extern "C" fn dynasour_does_nothing() {}

/// Corrects the addresses of a program that can lie anywhere: this one cannot.
#[unsafe(no_mangle)]
extern "C" fn _dl_relocate_static_pie() {}

/// The directory of the program. None is known (-1): glibc would ask the kernel, which takes 25 µs
/// (measured), and needs the answer only to load libraries.
#[unsafe(no_mangle)]
extern "C" fn _dl_get_origin() -> isize {
    -1
}

#[cfg(own_start)]
mod own_start {
    use std::arch::asm;
    use std::ffi::{c_char, c_int, c_void};

    type Main = extern "C" fn(c_int, *const *const c_char, *const *const c_char) -> c_int;
    type Initialiser = extern "C" fn(c_int, *const *const c_char, *const *const c_char);

    /// A relocation record (ELF-64 object file format, figure 4-3).
    #[repr(C)]
    struct Relocation {
        place: *mut usize,
        kind: u64,
        resolver: Option<extern "C" fn() -> usize>,
    }

    unsafe extern "C" {
        // glibc's, all of them hidden from dynamic programs.
        static mut __libc_stack_end: *const c_void;
        static mut __environ: *const *const c_char;
        static __libc_enable_secure: c_int;
        static _dl_random: *const usize;
        fn _dl_aux_init(auxiliary: *const [u64; 2]);
        fn __tunables_init(environment: *const *const c_char);
        fn __libc_setup_tls();
        fn __libc_early_init(initial: bool);
        fn __libc_init_first(
            argc: c_int,
            argv: *const *const c_char,
            environment: *const *const c_char,
        );
        fn __libc_check_standard_fds();
        fn _init();
        fn exit(status: c_int) -> !;
        // The linker's.
        static __rela_iplt_start: [Relocation; 0];
        static __rela_iplt_end: [Relocation; 0];
        static __preinit_array_start: [Initialiser; 0];
        static __preinit_array_end: [Initialiser; 0];
        static __init_array_start: [Initialiser; 0];
        static __init_array_end: [Initialiser; 0];
    }

    // Constants of functions that copy and fill memory, in bytes. glibc's values before it knows
    // the processor, and for the last two, which are 0 there, three quarters of the shared cache.
    #[unsafe(no_mangle)]
    static __x86_data_cache_size: i64 = 32 << 10;
    #[unsafe(no_mangle)]
    static __x86_data_cache_size_half: i64 = 16 << 10;
    #[unsafe(no_mangle)]
    static __x86_shared_cache_size: i64 = 1 << 20;
    #[unsafe(no_mangle)]
    static __x86_shared_cache_size_half: i64 = 512 << 10;
    #[unsafe(no_mangle)]
    static __x86_rep_movsb_threshold: i64 = 2048;
    #[unsafe(no_mangle)]
    static __x86_rep_stosb_threshold: i64 = 2048;
    #[unsafe(no_mangle)]
    static __x86_shared_non_temporal_threshold: i64 = 768 << 10;
    #[unsafe(no_mangle)]
    static __x86_rep_movsb_stop_threshold: i64 = 768 << 10;
    #[unsafe(no_mangle)]
    static __x86_string_control: c_int = 0;

    /// What lies from `start` to `end`, which the linker defines.
    unsafe fn between<T>(start: &'static [T; 0], end: &'static [T; 0]) -> &'static [T] {
        let (start, end) = (start.as_ptr(), end.as_ptr());
        let length = (end.addr() - start.addr()) / size_of::<T>();
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    /// Writes the addresses of the functions that glibc chooses by the processor's features.
    unsafe fn choose_functions() {
        // SAFETY: the linker's records of this program.
        for relocation in unsafe { between(&__rela_iplt_start, &__rela_iplt_end) } {
            if let Some(resolver) = relocation.resolver {
                // SAFETY: the place is a slot for such an address.
                unsafe { relocation.place.write(resolver()) };
            }
        }
    }

    /// Fills in what compiled C code expects in thread-local storage: the stack protector's value,
    /// and the value by which saved code addresses are disguised.
    unsafe fn set_guards() {
        // SAFETY: 16 random bytes from the kernel; the places are glibc's `tcbhead_t`.
        unsafe {
            let stack = _dl_random.read() & !0xff;
            asm!("mov fs:[0x28], {}", in(reg) stack, options(nostack, preserves_flags));
            let pointers = _dl_random.add(1).read();
            asm!("mov fs:[0x30], {}", in(reg) pointers, options(nostack, preserves_flags));
        }
    }

    /// Starts the program; `_start` calls it. The functions `init`, `fini` and `rtld_fini` are those
    /// of a dynamic program.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __libc_start_main(
        main: Main,
        argc: c_int,
        argv: *const *const c_char,
        _init_function: *const c_void,
        _fini: *const c_void,
        _rtld_fini: *const c_void,
        stack_end: *const c_void,
    ) -> ! {
        // SAFETY: glibc's functions in glibc's order. The kernel puts the environment behind the
        // arguments, and the auxiliary vector behind the environment.
        unsafe {
            let environment = argv.add(argc as usize + 1);
            __libc_stack_end = stack_end;
            __environ = environment;
            let mut end = environment;
            while !end.read_volatile().is_null() {
                end = end.add(1);
            }
            _dl_aux_init(end.add(1).cast());
            __tunables_init(environment);
            choose_functions();
            __libc_setup_tls();
            set_guards();
            __libc_early_init(true);
            __libc_init_first(argc, argv, environment);
            if __libc_enable_secure != 0 {
                __libc_check_standard_fds();
            }
            for initialise in between(&__preinit_array_start, &__preinit_array_end) {
                initialise(argc, argv, environment);
            }
            _init();
            for initialise in between(&__init_array_start, &__init_array_end) {
                initialise(argc, argv, environment);
            }
            exit(main(argc, argv, environment))
        }
    }
}
