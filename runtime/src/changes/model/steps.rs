//! The operations, step by step.

use super::bug::Bug;
use super::state::{
    Code, MAPPING, Op, PAGES, Program, Rights, STORE, State, THREADS, ThreadState, W, X,
};

/// The outcome of one step of a thread.
#[derive(Debug)]
pub enum Transition {
    /// The thread waits for another one.
    Blocked,
    Next(Box<State>),
    /// An invariant does not hold.
    Violation(&'static str),
}

pub fn next(state: State) -> Transition {
    Transition::Next(Box::new(state))
}

/// The stage at which an operation ends in guest code, which goes on.
const DIRECT: u8 = 99;

/// The stage at which an operation ends in the runtime: what the host has written to is dropped
/// first.
pub const SETTLE: u8 = 100;

impl State {
    /// The next step of thread `t`.
    pub fn step(&self, program: &Program, t: usize) -> Transition {
        let thread = &self.threads[t];
        let Some(op) = program.op(t, thread.at).filter(|_| thread.begun && !thread.gone) else {
            return Transition::Blocked;
        };
        if let Some(drop) = thread.dropping {
            return self.step_dropping(program, t, drop);
        }
        if thread.stage >= DIRECT {
            return self.settle(program, t);
        }
        match op {
            Op::Store(p) => self.store(program, t, p),
            Op::Interpret(p) => self.interpret(program, t, p),
            Op::Run(p) => self.run(program, t, p),
            Op::Trace(p) => self.trace(t, p),
            Op::Protect(..) | Op::Refused(_) | Op::Unmap(_) | Op::Map(..) | Op::Remap(_) => {
                self.mapping_call(program, t, op)
            }
            Op::Output(p) => self.output(program, t, p),
            Op::HostStore(p) => self.host_store(program, t, p),
            Op::Patch(p) => self.patch(program, t, p),
            Op::Spawn => {
                let mut state = self.clone();
                state.threaded = true;
                if let Some(new) = state.threads.iter_mut().find(|thread| !thread.begun) {
                    new.begun = true;
                }
                state.at_stage(t, SETTLE)
            }
            Op::Fork => {
                if self.exclusive.is_some() || self.fragments.is_some() {
                    return Transition::Blocked;
                }
                let mut state = self.clone();
                for page in &mut state.pages {
                    (page.shared, page.resting, page.announced) = (None, None, [0; 3]);
                }
                (0..THREADS)
                    .filter(|other| *other != t)
                    .for_each(|other| state.threads[other].gone = true);
                state.at_stage(t, SETTLE)
            }
        }
    }

    pub fn at_stage(mut self, t: usize, stage: u8) -> Transition {
        self.threads[t].stage = stage;
        next(self)
    }

    pub fn take_exclusive(&self, t: usize, stage: u8) -> Transition {
        match self.exclusive {
            Some(_) => Transition::Blocked,
            None => State { exclusive: Some(t as u8), ..self.clone() }.at_stage(t, stage),
        }
    }

    fn go(&mut self, t: usize, state: ThreadState) {
        self.threads[t].state = state;
        self.threads[t].moves += 1;
    }

    /// Asks the kernel what is mapped.
    fn refresh(&mut self) {
        for page in &mut self.pages {
            page.record = page.mapped.then_some(page.rights);
        }
    }

    /// The guest sees a fault or an error.
    pub fn refused(&self, t: usize, what: &'static str) -> Transition {
        if !self.threads[t].forbidden {
            return Transition::Violation(what);
        }
        let mut state = self.clone();
        if state.threads[t].state != ThreadState::Outside {
            state.go(t, ThreadState::Outside);
        }
        state.at_stage(t, SETTLE)
    }

    /// Drops what the host has written to, and completes the operation.
    fn settle(&self, program: &Program, t: usize) -> Transition {
        let written = || (0..PAGES).find(|p| self.pages[*p].written);
        match self.threads[t].stage {
            SETTLE
                if self.written && program.has(Bug::DroppingNotAwaited) && written().is_none() => {}
            SETTLE if self.written => return self.take_exclusive(t, SETTLE + 1),
            SETTLE | DIRECT => {}
            _ => {
                let mut state = self.clone();
                if let Some(p) = written() {
                    state.pages[p].written = false;
                    state.drop_page(t, p);
                    return next(state);
                }
                (state.written, state.exclusive) = (false, None);
                return state.at_stage(t, SETTLE);
            }
        }
        let mut state = self.clone();
        let op = program.op(t, state.threads[t].at);
        if let Some(op) = op {
            let page = &mut state.pages[op.page()];
            if let Some(version) = state.threads[t].effect.take() {
                page.completed = page.completed.max(version);
            }
            if std::mem::take(&mut state.threads[t].denies) && !page.may(X) {
                page.denied = true;
            }
        }
        state.threads[t].at += 1;
        state.threads[t].running = None;
        state.begin_operation(program, t);
        next(state)
    }

    /// The guest's rights or mappings have changed.
    pub fn rights_changed(&mut self, program: &Program, p: usize) {
        if self.pages[p].may(X) {
            self.pages[p].denied = false;
        }
        self.note_forbidden(program);
    }

    pub fn write(&mut self, t: usize, p: usize) {
        self.pages[p].version += 1;
        self.threads[t].effect = Some(self.pages[p].version);
    }

    fn store(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        let opens_first = program.has(Bug::StoreOpensFirst);
        match self.threads[t].stage {
            0 if self.pages[p].kernel_writable() => {
                state.write(t, p);
                state.at_stage(t, DIRECT)
            }
            0 => state.at_stage(t, 1),
            1 => self.take_exclusive(t, 2),
            2 if self.pages[p].guarded.is_some() => {
                state.pages[p].announced[STORE] += 1;
                if opens_first {
                    state.pages[p].guarded = None;
                }
                state.drop_page(t, p);
                state.at_stage(t, 3)
            }
            2 => {
                state.exclusive = None;
                if state.is_writable(program, p) {
                    return state.at_stage(t, 0);
                }
                state.refused(t, "a store faults that the guest's rights allow")
            }
            3 => {
                state.pages[p].guarded = None;
                state.at_stage(t, 4)
            }
            _ => {
                state.pages[p].announced[STORE] -= 1;
                state.exclusive = None;
                state.at_stage(t, 0)
            }
        }
    }

    pub fn is_writable(&mut self, program: &Program, p: usize) -> bool {
        match self.pages[p].record {
            Some(rights) if rights & W == 0 => return false,
            None if program.has(Bug::ForgottenForbids) => return false,
            _ => self.refresh(),
        }
        self.pages[p].record.is_some_and(|rights| rights & W != 0)
    }

    /// Enters guest code: the first stages of executing code, which end at stage 2.
    fn enter(&self, t: usize) -> Transition {
        let mut state = self.clone();
        match self.threads[t].stage {
            0 => {
                state.go(t, ThreadState::Interpreting);
                state.at_stage(t, 1)
            }
            1 if self.threads[t].posted == [false; PAGES] => state.at_stage(t, 2),
            1 => {
                state.go(t, ThreadState::Outside);
                state.at_stage(t, 9)
            }
            _ => {
                let thread = &mut state.threads[t];
                for p in 0..PAGES {
                    if std::mem::take(&mut thread.posted[p]) {
                        thread.own[p] = None;
                    }
                }
                state.at_stage(t, 0)
            }
        }
    }

    /// Reads the page and guards it, from stage `first` on; at stage `first + 4` the code is in
    /// `running`.
    fn translate(&self, program: &Program, t: usize, p: usize, first: u8) -> Transition {
        let mut state = self.clone();
        match self.threads[t].stage - first {
            0 => {
                state.pages[p].read = true;
                state.threads[t].moment = state.moment;
                state.at_stage(t, first + 1)
            }
            1 => match state.fetchable(p) {
                true => state.at_stage(t, first + 2),
                false => state.release_and_refuse(t),
            },
            2 if !self.pages[p].mapped => state.release_and_refuse(t),
            2 => {
                state.threads[t].fetched = state.pages[p].version;
                state.at_stage(t, first + 3)
            }
            _ => match state.watch(program, p, self.threads[t].moment) {
                Watched::Now => state.at_stage(t, first),
                watched => {
                    let checks = watched == Watched::Impossible;
                    let version =
                        if checks { state.pages[p].version } else { self.threads[t].fetched };
                    state.threads[t].running = Some(Code { version, checks });
                    state.at_stage(t, first + 4)
                }
            },
        }
    }

    fn release_and_refuse(mut self, t: usize) -> Transition {
        if self.fragments == Some(t as u8) {
            self.fragments = None;
        }
        self.refused(t, "code cannot be fetched that the guest's rights allow")
    }

    fn fetchable(&mut self, p: usize) -> bool {
        let executable =
            |state: &State| state.pages[p].record.is_some_and(|rights| rights & X != 0);
        executable(self) || {
            self.refresh();
            executable(self)
        }
    }

    fn watch(&mut self, program: &Program, p: usize, since: u8) -> Watched {
        let ignores = program.has(Bug::AnnouncementIgnored);
        if self.pages[p].announced[MAPPING] > 0 && !ignores {
            return Watched::Impossible;
        }
        if self.published > since && !program.has(Bug::PublicationIgnored) {
            return Watched::Now;
        }
        let page = &mut self.pages[p];
        if page.record.is_none_or(|rights| rights & W == 0) {
            return Watched::Already;
        }
        if page.is_announced() && !ignores {
            return Watched::Impossible;
        }
        match page.guarded {
            Some(_) if program.has(Bug::TrustsOtherGuards) => Watched::Already,
            Some(moment) if moment <= since => Watched::Already,
            Some(_) => Watched::Now,
            None if !page.mapped => Watched::Impossible,
            None => {
                self.moment += 1;
                page.guarded = Some(self.moment);
                Watched::Now
            }
        }
    }

    /// Runs `code`: false if its bytes are not there any more.
    fn begin_code(&self, p: usize, code: Code) -> Result<bool, &'static str> {
        let page = &self.pages[p];
        if code.checks && (!page.mapped || code.version != page.version) {
            return Ok(false);
        }
        if code.version < page.completed {
            return Err("code runs that was made before a change that has completed");
        }
        if page.denied {
            return Err("code runs that may not be executed any more");
        }
        Ok(true)
    }

    fn interpret(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        match self.threads[t].stage {
            0 | 1 | 9 => self.enter(t),
            2 => match self.threads[t].own[p] {
                Some(code) => {
                    state.threads[t].running = Some(code);
                    state.at_stage(t, 7)
                }
                None => state.at_stage(t, 3),
            },
            3..=6 => self.translate(program, t, p, 3),
            _ => {
                let Some(code) = self.threads[t].running else {
                    return Transition::Violation("nothing to run");
                };
                match self.begin_code(p, code) {
                    Err(what) => return Transition::Violation(what),
                    Ok(false) => {
                        state.threads[t].own[p] = None;
                        return state.at_stage(t, 3);
                    }
                    Ok(true) => {}
                }
                state.threads[t].own[p] = Some(code);
                state.go(t, ThreadState::Outside);
                state.at_stage(t, DIRECT)
            }
        }
    }

    fn run(&self, program: &Program, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        let page = &self.pages[p];
        match self.threads[t].stage {
            0 | 1 | 9 => self.enter(t),
            2 if self.fragments.is_some() => Transition::Blocked,
            2 => {
                state.fragments = Some(t as u8);
                let stage = match (page.shared, page.resting) {
                    (Some(_), _) => 30,
                    (None, Some(_)) => 10,
                    (None, None) => 20,
                };
                state.threads[t].running = page.shared;
                state.at_stage(t, stage)
            }
            // A fragment that rests comes back if nothing is about to change, and its bytes are
            // there, to stay.
            10 if page.is_announced() && !program.has(Bug::WakesWhileChanging) => {
                state.drop_resting(t, p)
            }
            10 => match state.fetchable(p) {
                true => state.at_stage(t, 11),
                false => state.drop_resting(t, p),
            },
            11 => match state.watch(program, p, self.moment) {
                Watched::Impossible if !program.has(Bug::WakesWhileChanging) => {
                    state.drop_resting(t, p)
                }
                _ => state.at_stage(t, 12),
            },
            12 => match page.resting.filter(|code| page.mapped && code.version == page.version) {
                Some(code) => {
                    (state.pages[p].shared, state.pages[p].resting) = (Some(code), None);
                    state.threads[t].running = Some(code);
                    state.at_stage(t, 30)
                }
                None => state.drop_resting(t, p),
            },
            20..=23 => self.translate(program, t, p, 20),
            24 => {
                state.pages[p].shared = self.threads[t].running;
                state.at_stage(t, 30)
            }
            30 => {
                state.go(t, ThreadState::Cache);
                state.fragments = None;
                state.at_stage(t, 31)
            }
            31 => {
                let Some(code) = self.threads[t].running else {
                    return Transition::Violation("nothing to run");
                };
                match self.begin_code(p, code) {
                    Err(what) => Transition::Violation(what),
                    Ok(true) => state.at_stage(t, 33),
                    Ok(false) => state.at_stage(t, 32),
                }
            }
            // Native code has left, and comes to the runtime, which needs the lock.
            _ if self.fragments.is_some() => Transition::Blocked,
            32 => {
                if state.pages[p].shared == self.threads[t].running {
                    state.pages[p].shared = None;
                }
                state.go(t, ThreadState::Interpreting);
                state.at_stage(t, 1)
            }
            _ => {
                state.go(t, ThreadState::Outside);
                state.at_stage(t, DIRECT)
            }
        }
    }

    fn drop_resting(mut self, t: usize, p: usize) -> Transition {
        self.pages[p].resting = None;
        self.at_stage(t, 20)
    }

    fn trace(&self, t: usize, p: usize) -> Transition {
        let mut state = self.clone();
        match self.threads[t].stage {
            0 => match self.threads[t].own[p] {
                None => state.at_stage(t, SETTLE),
                Some(_) if self.fragments.is_some() => Transition::Blocked,
                Some(code) => {
                    (state.threads[t].running, state.threads[t].plan) =
                        (Some(code), self.generation);
                    state.at_stage(t, 1)
                }
            },
            1 if self.threads[t].posted[p] => state.at_stage(t, SETTLE),
            1 => state.at_stage(t, 2),
            _ if self.fragments.is_some() => Transition::Blocked,
            _ => {
                if self.threads[t].plan == self.generation {
                    state.pages[p].shared = self.threads[t].running;
                }
                state.at_stage(t, SETTLE)
            }
        }
    }

    /// The rights of a page at the end, for tests of the model itself.
    pub fn rights(&self, p: usize) -> Option<Rights> {
        self.pages[p].mapped.then_some(self.pages[p].rights)
    }
}

/// As [`dynasour_guest::decode::Watched`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Watched {
    Already,
    Now,
    Impossible,
}
