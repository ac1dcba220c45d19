//! Which edges a [`Policy`] sees under each [`Watch`].

use super::*;

/// Records the edges that it is asked about, and stops when a block has been reached ten times by
/// backward jumps.
struct Edges {
    watch: Watch,
    seen: Vec<EdgeKind>,
    lifted: u32,
}

impl Policy for Edges {
    type Stop = u64;

    fn watch(&self) -> Watch {
        self.watch
    }

    fn edge(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &mut BlockEntry,
        kind: EdgeKind,
    ) -> Option<u64> {
        self.seen.push(kind);
        assert_ne!(from, 0);
        if kind != (EdgeKind::Taken { backward: true }) {
            return None;
        }
        to.counter += 1;
        self.lifted = to.lifted().count;
        (to.counter == 10).then_some(context.gpr[0])
    }
}

/// A loop with a call in it, after ten iterations, and the edges that the policy saw.
fn edges(watch: Watch) -> (Guest, Edges) {
    let mut guest = Guest::new(|a| {
        let mut head = a.create_label();
        let mut f = a.create_label();
        a.set_label(&mut head)?;
        a.add(eax, 3)?;
        a.call(f)?;
        a.cmp(eax, 1000)?;
        a.jb(head)?;
        a.syscall()?;
        a.set_label(&mut f)?;
        a.ret()
    });
    let mut edges = Edges { watch, seen: Vec::new(), lifted: 0 };
    assert_eq!(guest.interp.run(&mut guest.context, &mut edges), Stop::Policy(30));
    assert_eq!((guest.context.rip, guest.context.gpr[0]), (guest.base(), 30));
    (guest, edges)
}

const ROUND: [EdgeKind; 3] = [EdgeKind::Call, EdgeKind::Ret, EdgeKind::Taken { backward: true }];

#[test]
fn a_policy_sees_edges_and_can_stop() {
    let (mut guest, edges) = edges(Watch::All);
    assert_eq!(edges.seen, ROUND.repeat(10));
    assert_eq!(edges.lifted, 2);
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!(guest.context.gpr[0], 1002);
}

#[test]
fn a_policy_that_watches_heads_sees_calls_backward_jumps_and_marked_blocks() {
    let (mut guest, mut edges) = edges(Watch::Heads);
    let quiet: Vec<EdgeKind> = ROUND.into_iter().filter(|k| *k != EdgeKind::Ret).collect();
    assert_eq!(edges.seen, [&ROUND[..], &quiet.repeat(9)].concat(), "a return only when it is new");
    let after_the_call = guest.base() + 10;
    assert_eq!(guest.interp.entry(after_the_call).unwrap().count, 2);
    guest.interp.entry(after_the_call).unwrap().user = 1;
    guest.interp.entry(guest.context.rip).unwrap().counter = 8;
    edges.seen.clear();
    assert_eq!(guest.interp.run(&mut guest.context, &mut edges), Stop::Policy(36));
    assert_eq!(edges.seen, ROUND.repeat(2));
}

#[test]
fn an_edge_that_the_policy_does_not_watch_still_stops_for_pending() {
    let mut guest = Guest::new(|a| {
        let mut head = a.create_label();
        a.set_label(&mut head)?;
        a.inc(eax)?;
        a.mov(dword_ptr(rbx), ecx)?;
        a.jmp(head)
    });
    // The guest's own store sets `pending`.
    guest.context.gpr[3] = &raw const guest.context.pending as u64;
    guest.context.gpr[1] = 0;
    guest.context.gpr[0] = 0;
    let mut limit = Edges { watch: Watch::Heads, seen: Vec::new(), lifted: 0 };
    assert_eq!(guest.interp.run(&mut guest.context, &mut limit), Stop::Policy(10));
    guest.context.gpr[1] = 1;
    assert_eq!(guest.run(), Stop::Pending);
    assert_eq!((guest.context.rip, guest.context.gpr[0]), (guest.base(), 11));
}
