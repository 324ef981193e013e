//! Which seeds a randomized test runs, and on which processors.

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

/// The runs of a test without a wish.
const USUAL: u64 = 200;

/// The value of a variable of the environment.
pub(super) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// The seeds of a test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seeds {
    first: u64,
    end: u64,
    /// No run begins later.
    until: Option<Instant>,
}

impl Seeds {
    /// From `HOLDFAST_FIRST_SEED` on, `HOLDFAST_SEEDS` of them, or as many as begin within
    /// `HOLDFAST_MINUTES`.
    pub(super) fn wanted() -> Self {
        let minutes = number("HOLDFAST_MINUTES");
        let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
        let first = number("HOLDFAST_FIRST_SEED").unwrap_or_default();
        let usual = if until.is_some() { u64::MAX } else { USUAL };
        let count = number("HOLDFAST_SEEDS").unwrap_or(usual);
        Seeds { first, end: first.saturating_add(count), until }
    }

    /// Makes the runs on all processors, and returns their number and one sum for each processor.
    /// `add` makes the run of a seed, and adds its result to a sum.
    pub(super) fn run<S: Default + Send>(self, add: impl Fn(&mut S, u64) + Sync) -> (u64, Vec<S>) {
        let (began, processors) =
            (Instant::now(), thread::available_parallelism().map_or(1, NonZero::get));
        let part = |offset: usize| {
            let (mut sum, mut runs) = (S::default(), 0);
            for seed in (self.first + offset as u64..self.end).step_by(processors) {
                if self.until.is_some_and(|until| Instant::now() >= until) {
                    break;
                }
                add(&mut sum, seed);
                runs += 1;
            }
            (runs, sum)
        };
        let parts: Vec<(u64, S)> = thread::scope(|scope| {
            let part = &part;
            let parts: Vec<_> =
                (0..processors).map(|offset| scope.spawn(move || part(offset))).collect();
            parts.into_iter().map(|part| part.join().unwrap()).collect()
        });
        let runs = parts.iter().map(|(runs, _)| runs).sum();
        let each_second = runs as f64 / began.elapsed().as_secs_f64() / processors as f64;
        println!(
            "{runs} runs from seed {} on, {each_second:.0} a second and processor",
            self.first
        );
        (runs, parts.into_iter().map(|(_, sum)| sum).collect())
    }
}
