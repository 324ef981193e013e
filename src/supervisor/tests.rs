//! Tests of every way in which an actor can die. Its callers never notice.

use super::*;
use actix::{ActorContext, AsyncContext};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PATIENCE: Duration = Duration::from_secs(10);

/// The planned failures. Each happens once.
#[derive(Debug, Default)]
struct Plan {
    factory_panics: AtomicU64,
    started_panics: AtomicU64,
}

fn take(counter: &AtomicU64) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

struct Victim {
    life: Life,
    plan: Arc<Plan>,
}

impl Actor for Victim {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        assert!(!take(&self.plan.started_panics), "planned: started");
    }
}

#[derive(Clone, Copy, Message)]
#[rtype(result = "u64")]
enum Ask {
    Life,
    PanicInTimer,
    Stop,
}

/// Panics until the given life, then answers.
#[derive(Clone, Copy, Message)]
#[rtype(result = "u64")]
struct PanicBefore(u64);

impl Handler<Ask> for Victim {
    type Result = u64;

    fn handle(&mut self, ask: Ask, context: &mut Self::Context) -> u64 {
        match ask {
            Ask::Life => {}
            Ask::PanicInTimer => {
                context.run_later(Duration::from_millis(1), |_, _| panic!("planned: timer"));
            }
            Ask::Stop => context.stop(),
        }
        self.life.number
    }
}

impl Handler<PanicBefore> for Victim {
    type Result = u64;

    fn handle(&mut self, PanicBefore(life): PanicBefore, _: &mut Self::Context) -> u64 {
        assert!(self.life.number >= life, "planned: handler");
        self.life.number
    }
}

fn victim(plan: &Arc<Plan>, policy: Policy) -> (Handle<Victim>, mpsc::Receiver<&'static str>) {
    let (escalate, escalated) = mpsc::channel(1);
    let plan = Arc::clone(plan);
    let slot = Slot::new("victim");
    let handle = slot.handle();
    let (_, ending) = watch::channel(false);
    slot.start(actix::Arbiter::current(), Supervision { policy, escalate, ending }, move |life| {
        assert!(!take(&plan.factory_panics), "planned: factory");
        Victim { life, plan: Arc::clone(&plan) }
    });
    (handle, escalated)
}

async fn life_at_least(handle: &Handle<Victim>, wanted: u64) {
    let mailbox = handle.mailbox::<Ask>();
    while mailbox.call(Ask::Life, PATIENCE).await.unwrap() < wanted {
        tokio::task::yield_now().await;
    }
}

#[actix::test]
async fn a_call_survives_the_panic_that_it_causes() {
    let (handle, _escalated) = victim(&Arc::default(), Policy::default());
    assert_eq!(handle.mailbox().call(PanicBefore(4), PATIENCE).await, Ok(4));
}

#[actix::test]
async fn a_panic_in_a_timer_in_started_and_in_the_factory_is_survived() {
    let plan = Arc::<Plan>::default();
    let (handle, _escalated) = victim(&plan, Policy::default());
    let mailbox = handle.mailbox::<Ask>();
    assert_eq!(mailbox.call(Ask::Life, PATIENCE).await, Ok(1));

    mailbox.call(Ask::PanicInTimer, PATIENCE).await.unwrap();
    life_at_least(&handle, 2).await;

    plan.started_panics.store(1, Ordering::SeqCst);
    plan.factory_panics.store(1, Ordering::SeqCst);
    mailbox.call(Ask::Stop, PATIENCE).await.unwrap();
    // Life 3 dies in its factory, life 4 in `started`.
    life_at_least(&handle, 5).await;
}

#[actix::test]
async fn calls_of_many_callers_all_arrive_despite_many_deaths() {
    let policy = Policy { deaths_max: usize::MAX, ..Policy::default() };
    let (handle, _escalated) = victim(&Arc::default(), policy);
    let callers: Vec<_> = (0..64)
        .map(|caller| {
            let (ask, bomb) = (handle.mailbox::<Ask>(), handle.mailbox::<PanicBefore>());
            actix::spawn(async move {
                for round in 0..50 {
                    if caller == 0 && round % 5 == 0 {
                        let life = ask.call(Ask::Life, PATIENCE).await.unwrap();
                        bomb.call(PanicBefore(life + 1), PATIENCE).await.unwrap();
                    }
                    ask.call(Ask::Life, PATIENCE).await.unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    life_at_least(&handle, 11).await;
}

#[actix::test]
async fn an_actor_that_keeps_dying_escalates_and_its_calls_fail() {
    let plan = Arc::<Plan>::default();
    plan.factory_panics.store(u64::MAX, Ordering::SeqCst);
    let policy = Policy { deaths_max: 5, ..Policy::default() };
    let (handle, mut escalated) = victim(&plan, policy);
    assert_eq!(handle.mailbox().call(Ask::Life, PATIENCE).await, Err(CallError::GivenUp("victim")));
    assert_eq!(escalated.recv().await, Some("victim"));
}

#[test]
fn the_first_rebuild_does_not_wait_and_the_wait_is_bounded() {
    let policy = Policy::default();
    assert_eq!(backoff(&policy, 1), Duration::ZERO);
    assert_eq!(backoff(&policy, 2), policy.backoff_min);
    assert_eq!(backoff(&policy, 3), policy.backoff_min * 2);
    assert_eq!(backoff(&policy, 1000), policy.backoff_max);
}
