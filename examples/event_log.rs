//! Prints what happens to the traces of a program while it runs, one line for each event.
//!
//! ```text
//! cargo run --example event_log -- sh -c 'i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done'
//! made t1 loop at 0x55d5f3c0a2e4: 31 guest instructions, 54 of IR, 7 guards, 812 bytes in 1.2 ms
//! deopt t1 exit 4 branch@55d5f3c0a31b.3 to 0x55d5f3c0a31d
//! linked t1 exit 4 to t2
//! …
//! ```
//!
//! The log goes to standard error; standard output is the program's. The exit status is the program's, too. Heads are
//! hot after 50 executions, so that there is something to see in short programs.

use dynasour::events::Target;
use dynasour::{Event, Session, SessionError, Tier};
use std::process::ExitCode;

fn line(event: &Event) -> String {
    match event {
        Event::Made(made) => format!(
            "made {} {} at {:#x}{}: {} guest instructions, {} of IR, {} guards, {} bytes in {:.1} ms",
            made.version,
            if made.is_loop { "loop" } else { "path" },
            made.pc,
            made.side_of
                .as_ref()
                .map_or(String::new(), |(t, exit)| format!(" for {t} exit {exit}")),
            made.guest_instructions,
            made.ir_instructions,
            made.guards.len(),
            made.code_bytes,
            made.compile_nanoseconds as f64 / 1e6,
        ),
        Event::Failed { pc, reason } => format!("failed {pc:#x}: {reason}"),
        Event::Linked { from, exit, to } => match to {
            Target::Trace(to) => format!("linked {from} exit {exit} to {to}"),
            Target::Code(pc) => format!("linked {from} exit {exit} to code at {pc:#x}"),
            _ => format!("linked {from} exit {exit} to computed targets"),
        },
        Event::Invalidated { version, pc, why } => {
            format!("invalidated {version} at {pc:#x}: {why:?}")
        }
        Event::Revived { version, pc } => format!("revived {version} at {pc:#x}"),
        Event::Deopt { version, exit, guard, pc, reason } => {
            let what = guard.clone().unwrap_or_else(|| format!("{reason:?}"));
            format!("deopt {version} exit {exit} {what} to {pc:#x}")
        }
        Event::Flush => "flush".to_string(),
        other => format!("{other:?}"),
    }
}

fn main() -> ExitCode {
    let mut command = std::env::args_os().skip(1);
    let Some(program) = command.next() else {
        eprintln!("usage: event_log PROGRAM [ARG]…");
        return ExitCode::from(2);
    };
    let session = Session::builder(program).args(command).tier(Tier::Dynamo).threshold(50);
    match session.subscriber(|event| eprintln!("{}", line(event))).run() {
        Ok(outcome) => ExitCode::from(outcome.status.code().unwrap_or(1) as u8),
        Err(error) => {
            eprintln!("event_log: {error}");
            match error {
                SessionError::NotStarted { status, .. } => ExitCode::from(status as u8),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
