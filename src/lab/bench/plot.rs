//! A line chart as SVG: no script, no embedded font, readable on a light and a dark background.

use crate::picture::markup::escape;
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const BOTTOM: f64 = 46.0;
/// Height of a row of the legend.
const LEGEND_ROW: f64 = 20.0;
/// Approximate width of a character.
const CHAR_WIDTH: f64 = 7.0;
/// Approximate number of ticks of an axis.
const TICKS: f64 = 6.0;
/// Colours of medium lightness, and dash patterns for readers who cannot distinguish the colours.
const STYLES: [(&str, &str); 7] = [
    ("#2f7ed8", ""),
    ("#e0701b", "7 3"),
    ("#2a9d5c", "2 3"),
    ("#b04fc4", "9 3 2 3"),
    ("#cf3a3a", "4 2"),
    ("#8a7a20", "12 3"),
    ("#7a7f87", "1 2"),
];

/// The scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// Linear, from zero.
    Linear,
    /// Logarithmic to base ten; values that are not positive are not drawn.
    Logarithmic,
    /// Percentiles from 0 to 100, by their number of nines: 90 to 99 is as wide as 99 to 99.9.
    Percentiles,
}

/// An axis: its quantity with the unit, and its scale.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis<'a> {
    pub(super) label: &'a str,
    pub(super) scale: Scale,
}

/// One line, with its points from left to right.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// Draws lines over common axes.
pub(super) fn svg(title: &str, x: Axis<'_>, y: Axis<'_>, lines: &[Line]) -> String {
    let values = |of: fn(&(f64, f64)) -> f64| {
        lines.iter().flat_map(|line| &line.points).map(of).collect::<Vec<_>>()
    };
    let (across, up) = (
        Ruler::new(x.scale, &values(|point| point.0)),
        Ruler::new(y.scale, &values(|point| point.1)),
    );
    let mut text = format!("<text x=\"0\" y=\"16\" class=\"hf-head\">{}</text>", escape(title));
    let top = legend(&mut text, lines) + 42.0;
    let height = top + HEIGHT;
    let (right, bottom) = (WIDTH - RIGHT, height - BOTTOM);
    let (to_x, to_y) =
        (|place: f64| LEFT + place * (right - LEFT), |place: f64| bottom - place * (bottom - top));

    let put = |text: &mut String, x: f64, y: f64, anchor: &str, words: &str| {
        let _infallible = write!(
            text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
            escape(words)
        );
    };
    let rule = |text: &mut String, from: (f64, f64), to: (f64, f64)| {
        let _infallible = write!(
            text,
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" class=\"hf-rule\"/>",
            from.0, from.1, to.0, to.1
        );
    };
    for (place, words) in up.ticks() {
        rule(&mut text, (LEFT, to_y(place)), (right, to_y(place)));
        put(&mut text, LEFT - 8.0, to_y(place) + 4.0, "end", &words);
    }
    for (place, words) in across.ticks() {
        rule(&mut text, (to_x(place), top), (to_x(place), bottom));
        put(&mut text, to_x(place), bottom + 18.0, "middle", &words);
    }
    put(&mut text, 0.0, top - 12.0, "start", y.label);
    put(&mut text, right, height - 6.0, "end", x.label);

    for (line, (colour, dashes)) in lines.iter().zip(STYLES.iter().cycle()) {
        let mut path = String::new();
        for place in line
            .points
            .iter()
            .filter_map(|(x, y)| Some((to_x(across.place(*x)?), to_y(up.place(*y)?))))
        {
            let _infallible = write!(
                path,
                "{}{:.1} {:.1}",
                if path.is_empty() { 'M' } else { 'L' },
                place.0,
                place.1
            );
        }
        if !path.is_empty() {
            let _infallible = write!(
                text,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linejoin=\"round\" \
                 stroke-linecap=\"round\" stroke-dasharray=\"{dashes}\"><title>{}</title></path>",
                escape(&line.name)
            );
        }
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-12 -12 {} {}\" width=\"{}\" height=\"{}\" role=\"img\" aria-label=\"{}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"12\">\n<style>text{{fill:#7a7f87}} .hf-head{{font-size:15px;\
         font-weight:600}} .hf-rule{{stroke:#7a7f87;stroke-opacity:.28}}</style>\n{text}</svg>\n",
        WIDTH + 24.0,
        height + 24.0,
        WIDTH + 24.0,
        height + 24.0,
        escape(title),
    )
}

/// Draws the legend, in as many rows as needed. Returns its height.
fn legend(text: &mut String, lines: &[Line]) -> f64 {
    let (mut x, mut y) = (0.0, 38.0);
    for (line, (colour, dashes)) in lines.iter().zip(STYLES.iter().cycle()) {
        let wide = 44.0
            + CHAR_WIDTH
                * f64::from(u32::try_from(line.name.chars().count().min(256)).unwrap_or(0));
        if x > 0.0 && x + wide > WIDTH {
            (x, y) = (0.0, y + LEGEND_ROW);
        }
        let _infallible = write!(
            text,
            "<path d=\"M{x:.1} {:.1}h24\" stroke=\"{colour}\" stroke-width=\"3\" stroke-dasharray=\"{dashes}\"/>\
             <text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            y - 4.0,
            x + 30.0,
            escape(&line.name)
        );
        x += wide;
    }
    y
}

/// The range of an axis, and the positions of values on it.
#[derive(Debug)]
struct Ruler {
    scale: Scale,
    from: f64,
    to: f64,
    /// Distance of two ticks, if they are evenly spaced.
    step: f64,
}

impl Ruler {
    fn new(scale: Scale, values: &[f64]) -> Ruler {
        let known: Vec<f64> =
            values.iter().copied().filter(|value| scaled(scale, *value).is_some()).collect();
        let least = known.iter().copied().reduce(f64::min);
        let most = known.iter().copied().reduce(f64::max);
        match scale {
            Scale::Linear => {
                let (least, most) = (least.unwrap_or(0.0).min(0.0), most.unwrap_or(0.0).max(0.0));
                let most = if most > least { most } else { least + 1.0 };
                let step = round((most - least) / TICKS);
                Ruler {
                    scale,
                    from: (least / step).floor() * step,
                    to: (most / step).ceil() * step,
                    step,
                }
            }
            Scale::Logarithmic => {
                // Both ends are 1, 2 or 5 times a power of ten: a full decade could be almost
                // empty.
                let least = least.unwrap_or(1.0);
                let power = 10_f64.powf(least.log10().floor());
                let from =
                    [5.0, 2.0].into_iter().find(|of| of * power <= least * 1.0001).unwrap_or(1.0)
                        * power;
                let to = round(most.unwrap_or(1.0).max(least)).max(from * 10.0);
                Ruler { scale, from, to, step: 0.0 }
            }
            Scale::Percentiles => {
                Ruler { scale, from: 0.0, to: most.unwrap_or(0.0).max(90.0), step: 0.0 }
            }
        }
    }

    /// The position, from 0 to 1.
    fn place(&self, value: f64) -> Option<f64> {
        let (from, to) = (scaled(self.scale, self.from)?, scaled(self.scale, self.to)?);
        scaled(self.scale, value).map(|value| (value - from) / (to - from))
    }

    /// Round values, each with its position.
    fn ticks(&self) -> Vec<(f64, String)> {
        let mut values = Vec::new();
        match self.scale {
            Scale::Linear => {
                let mut count = 0.0;
                while self.from + count * self.step <= self.to + self.step / 2.0 {
                    values.push(self.from + count * self.step);
                    count += 1.0;
                }
            }
            Scale::Logarithmic => {
                let decades = (self.to / self.from).log10();
                let within: &[f64] = if decades > 3.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let every = (decades / 8.0).ceil().max(1.0);
                let is_within =
                    |value: &f64| *value >= self.from * 0.999 && *value <= self.to * 1.001;
                let mut decade = self.from.log10().floor();
                while decade <= self.to.log10() + 0.01 {
                    values
                        .extend(within.iter().map(|of| 10_f64.powf(decade) * of).filter(is_within));
                    decade += every;
                }
            }
            Scale::Percentiles => {
                values.extend(
                    [0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999]
                        .into_iter()
                        .filter(|percentile| *percentile <= self.to),
                );
            }
        }
        let steps = if self.scale == Scale::Linear { self.step } else { 0.0 };
        values
            .into_iter()
            .filter_map(|value| Some((self.place(value)?, words(value, steps))))
            .collect()
    }
}

/// The coordinate of a value on its scale.
fn scaled(scale: Scale, value: f64) -> Option<f64> {
    let scaled = match scale {
        Scale::Linear => value,
        Scale::Logarithmic if value > 0.0 => value.log10(),
        Scale::Logarithmic => return None,
        // The maximum has no finite position by nines; draw it where the last of a million would
        // be.
        Scale::Percentiles => -(1.0 - value.clamp(0.0, 99.9999) / 100.0).log10(),
    };
    scaled.is_finite().then_some(scaled)
}

/// The next of 1, 2, 5 and 10 that is not less, in the value's own power of ten.
fn round(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let of = [1.0, 2.0, 5.0].into_iter().find(|of| of * power >= value * 0.9999).unwrap_or(10.0);
    of * power
}

/// The label of a tick, with as many digits as the step between ticks needs.
fn words(value: f64, step: f64) -> String {
    let (value, unit) = match value.abs() {
        large if large >= 1e9 => (value / 1e9, "G"),
        large if large >= 1e6 => (value / 1e6, "M"),
        large if large >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    // Sums of steps have rounding errors.
    let short = if step > 0.0 && unit.is_empty() && step < 1.0 {
        format!("{value:.*}", digits(step))
    } else {
        format!("{value:.6}")
    };
    let short = if short.contains('.') {
        short.trim_end_matches('0').trim_end_matches('.')
    } else {
        &short
    };
    format!("{}{unit}", if short == "-0" { "0" } else { short })
}

/// Number of decimal digits of a step.
fn digits(step: f64) -> usize {
    (1..9)
        .find(|digits| step * 10f64.powi(*digits) >= 0.9999)
        .map_or(9, |digits| usize::try_from(digits).unwrap_or(9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::markup::elements;

    fn ticks(scale: Scale, values: &[f64]) -> Vec<String> {
        Ruler::new(scale, values).ticks().into_iter().map(|(_, words)| words).collect()
    }

    #[test]
    fn ticks_are_round_and_hold_all_values_between_them() {
        assert_eq!(ticks(Scale::Linear, &[3.0, 57.0]), ["0", "10", "20", "30", "40", "50", "60"]);
        assert_eq!(ticks(Scale::Linear, &[0.0, 0.7]), ["0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(ticks(Scale::Linear, &[-5.0, 5.0]), ["-6", "-4", "-2", "0", "2", "4", "6"]);
        assert_eq!(
            ticks(Scale::Linear, &[120_000.0]),
            ["0", "20k", "40k", "60k", "80k", "100k", "120k"]
        );
        assert_eq!(
            ticks(Scale::Logarithmic, &[30.0, 700.0]),
            ["20", "50", "100", "200", "500", "1000"]
        );
        assert_eq!(
            ticks(Scale::Logarithmic, &[12.0, 3e6]),
            ["10", "100", "1000", "10k", "100k", "1M"]
        );
        assert_eq!(ticks(Scale::Percentiles, &[0.0, 99.95]), ["0", "50", "90", "99", "99.9"]);
    }

    #[test]
    fn nines_are_equally_far_from_each_other() {
        let ruler = Ruler::new(Scale::Percentiles, &[99.9]);
        let far = |from, to| ruler.place(to).unwrap() - ruler.place(from).unwrap();
        assert!((far(90.0, 99.0) - far(99.0, 99.9)).abs() < 1e-9);
        assert!(ruler.place(100.0).unwrap().is_finite());
    }

    #[test]
    fn a_line_stays_within_the_axes_and_what_has_no_place_is_left_out() {
        let points = vec![(0.0, 0.0), (50.0, 40.0), (99.0, f64::NAN), (100.0, 900.0)];
        let lines = [Line { name: "one".into(), points }];
        let axis = |label, scale| Axis { label, scale };
        let drawn = svg(
            "a figure",
            axis("percentile", Scale::Percentiles),
            axis("µs", Scale::Logarithmic),
            &lines,
        );
        elements(&drawn);
        let path = drawn
            .rsplit_once("<path d=\"")
            .and_then(|(_, rest)| rest.split_once('"'))
            .map(|(path, _)| path.to_owned());
        let places: Vec<f64> =
            path.unwrap().split(['M', 'L', ' ']).filter_map(|number| number.parse().ok()).collect();
        assert_eq!(places.len(), 4, "{places:?}");
        assert!(places.iter().all(|place| (0.0..=WIDTH).contains(place)), "{places:?}");
    }

    #[test]
    fn names_are_text_and_nothing_measured_is_an_empty_figure() {
        let evil = "</title><script>alert(1)</script>";
        let lines = [
            Line { name: evil.into(), points: vec![(0.0, 1.0)] },
            Line { name: "empty".into(), points: Vec::new() },
        ];
        let axis = Axis { label: evil, scale: Scale::Linear };
        for drawn in [svg(evil, axis, axis, &lines), svg(evil, axis, axis, &[])] {
            elements(&drawn);
            assert!(!drawn.contains("<script"), "{drawn}");
        }
    }
}
