//! What the processes of a run do that does not end: for the message of the failing test.
//!
//! No data, no lock. Example: `describe(4711)` lists each thread of the processes in group 4711 with
//! its state, the system call that it is in, and, if `gdb` is installed, its stack.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Lines of a stack that are shown.
const LINES: usize = 120;

/// The threads of all processes in the group.
pub fn describe(group: i32) -> String {
    let mut text = String::new();
    for process in numbers("/proc").filter(|process| group_of(*process) == Some(group)) {
        for thread in numbers(&format!("/proc/{process}/task")) {
            let file = |name: &str| {
                let path = format!("/proc/{process}/task/{thread}/{name}");
                fs::read_to_string(path).unwrap_or_default().trim().to_string()
            };
            let state = file("stat").rsplit(") ").next().and_then(|s| s.chars().next());
            let (state, call, place) = (state.unwrap_or('?'), file("syscall"), file("wchan"));
            let _ =
                writeln!(text, "process {process}, thread {thread}: {state}, {place}, call {call}");
            let _ = writeln!(text, "  {}", signals(&file("status")));
        }
        text.push_str(&stacks(process));
    }
    text
}

/// The numbers among the names in a folder of `/proc`.
fn numbers(folder: &str) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(Path::new(folder)).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The process group, the third field behind the name (proc_pid_stat(5)).
fn group_of(process: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(2)?.parse().ok()
}

/// Pending and blocked signals.
fn signals(status: &str) -> String {
    let names = ["SigPnd", "ShdPnd", "SigBlk", "TracerPid"];
    let lines = status.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    lines.map(|line| line.replace('\t', " ")).collect::<Vec<_>>().join(", ")
}

fn stacks(process: i32) -> String {
    let mut gdb = Command::new("gdb");
    gdb.args(["-p", &process.to_string(), "-batch", "-nx", "-ex", "thread apply all backtrace 20"]);
    let Ok(output) = gdb.output() else { return String::new() };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let frames = text.lines().filter(|line| line.starts_with(['#', 'T'])).take(LINES);
    frames.map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    #[test]
    fn a_process_that_sleeps_is_described() {
        let mut child = Command::new("sleep").arg("60").process_group(0).spawn().expect("sleep");
        let group = i32::try_from(child.id()).expect("a process id");
        let text = describe(group);
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert!(text.contains(&format!("process {group}, thread {group}: ")), "{text}");
    }
}
