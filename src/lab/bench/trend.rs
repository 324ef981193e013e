//! Growth of figures: a straight line through them by least squares, with the confidence of its
//! slope.

use super::measurements::number;
use serde_json::{Value, json};

/// The slope of figures over time, with its confidence interval of 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trend {
    /// Number of figures.
    pub(super) count: usize,
    /// Units of the figures per unit of time.
    pub(super) slope: f64,
    /// Half of the interval.
    pub(super) margin: f64,
}

impl Trend {
    /// The line through `(time, figure)`; `None` for fewer than five points.
    ///
    /// Figures that are sampled every few seconds are not independent: memory that is high now is
    /// high in the next sample. So the variance is multiplied by `(1 + r) / (1 - r)`, where `r` is
    /// the correlation of the deviations of successive samples. Without it, chance would be
    /// reported as growth.
    pub(super) fn of(points: &[(f64, f64)]) -> Option<Trend> {
        if points.len() < 5 {
            return None;
        }
        let n = number(points.len());
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        if spread <= 0.0 {
            return None;
        }
        let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
        let off: Vec<f64> =
            points.iter().map(|point| point.1 - y - slope * (point.0 - x)).collect();
        let squares: f64 = off.iter().map(|off| off * off).sum();
        let next: f64 = off.iter().zip(off.iter().skip(1)).map(|(one, next)| one * next).sum();
        let correlation = if squares > 0.0 { (next / squares).clamp(0.0, 0.99) } else { 0.0 };
        let degrees = n - 2.0;
        let deviation =
            (squares / degrees / spread * (1.0 + correlation) / (1.0 - correlation)).sqrt();
        Some(Trend { count: points.len(), slope, margin: student(degrees) * deviation })
    }

    /// Whether the slope is unlikely to be chance.
    pub(super) fn is_distinct(self) -> bool {
        self.slope.abs() > self.margin
    }

    /// The trend in words, with the unit of the slope.
    pub(super) fn in_words(self, what: &str, unit: &str) -> String {
        let verdict = if self.is_distinct() {
            "distinguishable from zero"
        } else {
            "not distinguishable from zero"
        };
        format!(
            "{what}: {:+.2} ± {:.2} {unit} ({} samples): {verdict}\n",
            self.slope, self.margin, self.count
        )
    }

    pub(super) fn json(self) -> Value {
        let short = |figure: f64| (figure * 1e3).round() / 1e3;
        json!({ "samples": self.count, "slope": short(self.slope), "margin": short(self.margin), "is_distinct": self.is_distinct() })
    }
}

/// The 95 % interval of Student's distribution by its degrees of freedom: the expansion about the
/// normal distribution, right to a hundredth from four degrees on (Abramowitz and Stegun, 26.7.5).
fn student(degrees: f64) -> f64 {
    let z: f64 = 1.959_964;
    let terms = [
        (z.powi(3) + z) / 4.0,
        (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0,
        (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0,
    ];
    z + terms[0] / degrees + terms[1] / degrees.powi(2) + terms[2] / degrees.powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(index: u32) -> f64 {
        // A fixed sequence without a trend.
        f64::from(index.wrapping_mul(2_654_435_761) >> 16 & 0xff) / 64.0 - 2.0
    }

    fn trend(figure: impl Fn(u32) -> f64) -> Trend {
        Trend::of(&(0..200).map(|at| (f64::from(at), figure(at))).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn quantiles_of_student_are_those_of_the_tables() {
        for (degrees, table) in [(4.0, 2.776), (10.0, 2.228), (30.0, 2.042), (1e6, 1.96)] {
            assert!((student(degrees) - table).abs() < 0.02, "{degrees}: {}", student(degrees));
        }
    }

    #[test]
    fn growth_is_distinguished_from_noise() {
        assert!(!trend(noise).is_distinct());
        let grows = trend(|at| 0.05 * f64::from(at) + noise(at));
        assert!(grows.is_distinct() && (grows.slope - 0.05).abs() < grows.margin, "{grows:?}");
        let exact = trend(|at| 3.0 - 2.0 * f64::from(at));
        assert!((exact.slope + 2.0).abs() < 1e-9 && exact.margin < 1e-9 && exact.is_distinct());
        assert_eq!(
            trend(|_| 7.0).in_words("descriptors", "an hour"),
            "descriptors: +0.00 ± 0.00 an hour (200 samples): not distinguishable from zero\n"
        );
    }

    /// Correlated noise has no trend, though a line through it has a slope.
    #[test]
    fn correlated_figures_have_a_wider_interval() {
        let alone = trend(noise);
        let together = trend(|at| noise(at / 10));
        assert!(together.margin > 2.0 * alone.margin, "{together:?} {alone:?}");
    }

    #[test]
    fn a_few_figures_have_no_trend() {
        assert_eq!(Trend::of(&[(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]), None);
        assert_eq!(Trend::of(&[(1.0, 1.0); 9]), None);
    }
}
