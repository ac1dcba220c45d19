//! Programs that load run as if the kernel had loaded them.

use std::path::Path;

use dynasour_guest::image::{LoadOptions, check};
use dynasour_guest::space::{self, LOW};
use nix::sys::mman::ProtFlags;

use crate::support::*;

const ARGUMENTS: [&str; 4] = ["other-name", "", "two words", "\u{e9}"];
const ENVIRONMENT: [&str; 3] = ["A=1", "EMPTY=", "PATH=/bin:/usr/bin"];

#[test]
fn programs_see_what_the_kernel_would_show() {
    let _alone = alone();
    let directory = scratch();
    for (kind, options) in KINDS {
        let program = compile(directory.path(), kind, SHOW, options);
        let native = run_native(&program, &ARGUMENTS, &ENVIRONMENT);
        assert_eq!(native.status, Ok(42), "{kind}");
        assert!(native.stdout.starts_with(b"argc 4\n"), "{kind}");
        for low in [true, false] {
            let options = LoadOptions { low, ..LoadOptions::default() };
            let loaded = run_loaded(&program, &ARGUMENTS, &ENVIRONMENT, &options);
            assert_eq!(
                String::from_utf8_lossy(&loaded.stdout),
                String::from_utf8_lossy(&native.stdout),
                "{kind}, low: {low}"
            );
            assert_eq!(loaded.status, native.status, "{kind}, low: {low}");
        }
    }
}

#[test]
fn many_arguments_and_a_large_environment() {
    let _alone = alone();
    let directory = scratch();
    let program = compile(directory.path(), "show", SHOW, &[]);
    let long = "x".repeat(100_000);
    let variables: Vec<String> = (0..500).map(|i| format!("V{i:03}={}", "y".repeat(i))).collect();
    let environment: Vec<&str> = variables.iter().map(String::as_str).collect();
    let mut arguments = vec!["show"];
    arguments.extend(std::iter::repeat_n("word", 1000));
    arguments.push(&long);
    let native = run_native(&program, &arguments, &environment);
    let loaded = run_loaded(&program, &arguments, &environment, &LoadOptions::default());
    assert!(native == loaded, "stdout or status differ");
}

#[test]
fn programs_of_the_system() {
    let _alone = alone();
    let cases: [&[&str]; 6] = [
        &["/bin/true"],
        &["/bin/false"],
        &["/bin/echo", "a", "b"],
        &["/bin/ls", "/etc/passwd"],
        &["/bin/sh", "-c", "echo $0 $1; exit 3", "zero", "one"],
        &["/lib64/ld-linux-x86-64.so.2", "/bin/echo", "by", "hand"],
    ];
    for arguments in cases {
        let native = run_native(Path::new(arguments[0]), arguments, &["LC_ALL=C"]);
        let loaded =
            run_loaded(Path::new(arguments[0]), arguments, &["LC_ALL=C"], &LoadOptions::default());
        assert_eq!(loaded, native, "{arguments:?}");
    }
}

/// The caller chooses a program's random bytes and its stack's size; the file chooses the stack's
/// permissions.
#[test]
fn stack_and_placement() {
    let _alone = alone();
    let directory = scratch();
    let plain = compile(directory.path(), "plain", EXIT_42, &["-pie", "-fPIE"]);
    let executable =
        compile(directory.path(), "executable", EXIT_42, &["-pie", "-fPIE", "-z", "execstack"]);
    for (path, expected) in [(&plain, false), (&executable, true)] {
        let outcome = in_child(|| {
            let options =
                LoadOptions { stack_size: Some(1 << 20), random: Some([7; 16]), low: true };
            let loaded = check(path)
                .expect("accepted")
                .load(&c_strings(&["x"]), &[], &options)
                .expect("loaded");
            assert_eq!(loaded.stack.range.end - loaded.stack.range.start, 1 << 20);
            assert!(loaded.stack.range.contains(&loaded.places.stack_pointer));
            let maps = space::maps().expect("maps");
            let at = |address: u64| maps.iter().find(|entry| entry.range.contains(&address));
            let stack = at(loaded.places.stack_pointer).expect("stack");
            assert_eq!(stack.prot.contains(ProtFlags::PROT_EXEC), expected);
            assert_eq!(at(loaded.stack.range.start - 1).expect("guard").prot, ProtFlags::PROT_NONE);
            assert!(loaded.places.stack_pointer > LOW.end);

            assert_eq!(loaded.images.len(), 2);
            let exe_path = loaded.exe_path(&maps);
            let path_of_linker =
                Path::new("/lib64/ld-linux-x86-64.so.2").canonicalize().expect("path");
            for (image, path) in loaded.images.iter().zip([&exe_path, &path_of_linker]) {
                assert!(LOW.start <= image.range.start && image.range.end <= LOW.end, "{image:x?}");
                // The pages show the file's bytes.
                let first = at(image.range.start).expect("image");
                assert_eq!(first.path.as_deref(), Some(path.as_os_str()));
                assert!(!first.shared && first.inode != 0);
            }
            let [program, linker] = &loaded.images[..] else { panic!("two images") };
            assert!(
                program.range.contains(&loaded.program_entry)
                    && linker.range.contains(&loaded.entry_pc)
            );
            assert!(linker.range.start >= program.range.end + space::PAGE);
            assert_eq!(exe_path, path.canonicalize().expect("path"));
            assert_eq!(loaded.exe_path(&[]), exe_path, "without a list");
            assert_eq!(loaded.comm.to_bytes(), path.file_name().expect("name").as_encoded_bytes());
            assert_eq!(loaded.brk.start(), loaded.brk.current());
            // No descriptor stays open that the guest could see.
            let open = std::fs::read_dir("/proc/self/fd").expect("descriptors");
            let shown: Vec<_> =
                open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect();
            assert!(
                shown.iter().all(|target| *target != exe_path && *target != path_of_linker),
                "{shown:?}"
            );
            0
        });
        assert_eq!(outcome.status, Ok(0));
    }
}

/// A mapping at the addresses of a program that cannot be moved is left unchanged.
#[test]
fn a_taken_address_is_a_refusal() {
    let _alone = alone();
    let directory = scratch();
    let fixed = compile(directory.path(), "fixed", EXIT_42, &["-no-pie", "-fno-pie"]);
    let outcome = in_child(|| {
        let blocker = space::Reservation::at(0x40_2000, space::PAGE).expect("free");
        let error = check(&fixed)
            .expect("accepted")
            .load(&[], &[], &LoadOptions::default())
            .expect_err("taken");
        let message = error.to_string();
        assert!(
            message.contains("cannot map segment at 0x400000") && !message.contains('\n'),
            "{message}"
        );
        assert_eq!((error.exit_status(), error.errno()), (126, libc::ENOMEM));
        let left: Vec<_> =
            space::maps().expect("maps").into_iter().filter(|m| m.range.end < 1 << 32).collect();
        assert_eq!(left.len(), 1, "only what was there before: {left:x?}");
        drop(blocker);
        check(&fixed).expect("accepted").load(&[], &[], &LoadOptions::default()).expect("loaded");
        0
    });
    assert_eq!(outcome.status, Ok(0));
}

/// Too little address space for the stack: an error, and nothing stays mapped.
#[test]
fn limits_of_the_process() {
    let _alone = alone();
    let outcome = in_child(|| {
        let plan = check(Path::new("/bin/true")).expect("accepted");
        let before = space::maps().expect("maps");
        let used: u64 = before.iter().map(|m| m.range.end - m.range.start).sum();
        let limit = libc::rlimit { rlim_cur: used + (4 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: `limit` is a valid limit; it concerns this child only.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        let options = LoadOptions { stack_size: Some(1 << 30), ..LoadOptions::default() };
        let error = plan.load(&c_strings(&["true"]), &[], &options).expect_err("too large");
        assert!(error.to_string().contains("cannot map a stack of 1073741824 bytes"), "{error}");
        let after = space::maps().expect("maps");
        assert!(after.iter().all(|m| m.range.start >= 1 << 32), "{after:x?}");

        let long = c_strings(&["true", &"x".repeat(200_000)]);
        let plan = check(Path::new("/bin/true")).expect("accepted");
        let error = plan.load(&long, &[], &LoadOptions::default()).expect_err("too long");
        assert_eq!(error.errno(), libc::E2BIG);
        0
    });
    assert_eq!(outcome.status, Ok(0));
}
