//! `#!` lines: [`check`] must predict the arguments with which the kernel runs the script.

use std::ffi::CString;
use std::path::Path;

use dynasour_guest::image::{Reason, check};

use crate::support::*;

/// An interpreter that prints its arguments, each ended by a NUL.
const INTERPRETER: &str = r#"
#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 0; i < argc; i++) { fputs(argv[i], stdout); putchar(0); }
    return 0;
}"#;

/// Compares what the kernel does with a script and what [`check`] predicts: the final arguments, or
/// an error number.
fn compare(script: &Path) -> Result<Vec<u8>, i32> {
    let native = native_refusal(script, &[os(b"zero"), os(b"one"), os(b"")]);
    let ours = check(script).map_err(|error| error.errno()).map(|plan| {
        let arguments = plan.arguments(&c_strings(&["zero", "one", ""]));
        arguments.iter().flat_map(|argument| argument.as_bytes_with_nul().to_vec()).collect()
    });
    assert_eq!(ours, native, "{:?}", std::fs::read(script).map(|bytes| os(&bytes).to_owned()));
    ours
}

#[test]
fn chains() {
    let _alone = alone();
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    let interpreter = compile(directory.path(), "show", INTERPRETER, &["-static"]);
    let shown = interpreter.display();
    let root = directory.path().display().to_string();

    file(&at("1"), format!("#! {shown} -a  b \nrest"), 0o755);
    assert_eq!(
        compare(&at("1")).expect("runs"),
        format!("{shown}\0-a  b\0{root}/1\0one\0\0").into_bytes(),
        "one argument, blanks inside kept"
    );
    for level in 2..=7 {
        file(&at(&level.to_string()), format!("#!{root}/{}\n", level - 1), 0o755);
    }
    assert!(compare(&at("5")).is_ok());
    assert_eq!(compare(&at("6")), Err(libc::ELOOP));
    let error = check(&at("7")).expect_err("too deep");
    assert_eq!((error.reason.clone(), error.exit_status()), (Reason::ScriptDepth, 126));
    file(&at("self"), format!("#!{root}/self\n"), 0o755);
    assert_eq!(compare(&at("self")), Err(libc::ELOOP));

    let plan = check(&at("5")).expect("accepted");
    assert_eq!(plan.program_path(), interpreter);
    assert_eq!(plan.file_name().to_bytes(), format!("{root}/5").as_bytes());
    assert_eq!(plan.comm().to_bytes(), b"5");
    assert_eq!(plan.script_prefix().len(), 7);
    // With no argument at all there is none to replace.
    assert_eq!(plan.arguments(&[]), plan.script_prefix());
    assert_eq!(check(&interpreter).expect("accepted").arguments(&[]), [CString::default()]);

    file(&at("missing"), "#!/nonexistent/interpreter -x\n", 0o755);
    assert_eq!(compare(&at("missing")), Err(libc::ENOENT));
    let error = check(&at("missing")).expect_err("missing");
    assert_eq!(error.exit_status(), 126);
    assert_eq!(
        error.to_string(),
        format!(
            "{root}/missing: script interpreter /nonexistent/interpreter: no such file or directory"
        )
    );
    file(&at("directory"), format!("#!{root}\n"), 0o755);
    assert_eq!(compare(&at("directory")), Err(libc::EACCES));
    file(&at("text"), "text", 0o755);
    file(&at("of-text"), format!("#!{root}/text\n"), 0o755);
    assert_eq!(compare(&at("of-text")), Err(libc::ENOEXEC));
    file(&at("not-executable"), format!("#!{shown}\n"), 0o644);
    assert_eq!(compare(&at("not-executable")), Err(libc::EACCES));
    file(&at("blank"), "#! \n", 0o755);
    assert_eq!(compare(&at("blank")), Err(libc::ENOEXEC));

    // The program really starts with these arguments.
    let loaded = run_loaded(&at("1"), &["zero", "one", ""], &[], &Default::default());
    assert_eq!(loaded.stdout, compare(&at("1")).expect("runs"));
}

/// Random lines: blanks, NULs, missing newlines and lengths, against the running kernel.
#[test]
fn random_lines() {
    let _alone = alone();
    let directory = scratch();
    let interpreter = compile(directory.path(), "show", INTERPRETER, &["-static"]);
    let name = interpreter.as_os_str().as_encoded_bytes();
    let script = directory.path().join("script");
    let mut random = Random::new("random_lines");
    let mut accepted = 0;
    for _ in 0..800 {
        let mut line = b"#!".to_vec();
        if random.below(4) == 0 {
            // Lines about as long as the part that the kernel reads.
            line.extend(vec![b' '; random.below(4) * 60]);
        }
        for _ in 0..1 + random.below(6) {
            match random.below(12) {
                0..=3 => line.extend(name),
                4..=6 => line.push(b' '),
                7 => line.push(b'\t'),
                8 => line.extend(b"-x"),
                9 => line.push(0),
                10 => line.extend(vec![b'a'; 200 + random.below(60)]),
                _ => line.push(b'\n'),
            }
        }
        file(&script, &line, 0o755);
        accepted += usize::from(compare(&script).is_ok());
    }
    assert!((100..700).contains(&accepted), "the mix is useful: {accepted} accepted");
}
