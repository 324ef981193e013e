//! Folds a tree for drawing: equal devices become one entry with their number; held or unhealthy
//! devices are drawn alone.

use super::leaf::Leaf;
use super::part::{Kind, Part, Picture};

/// The most virtual functions of one card that are drawn one by one.
const FUNCTIONS_MAX: usize = 4;
/// The most other equal devices in one place that are drawn one by one.
const DEVICES_MAX: usize = 16;
/// The most devices of a crowd that are drawn alone because they are held or unhealthy.
const ALONE_MAX: usize = 8;

/// The drawing of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// Its parts.
    pub parts: Vec<Shown>,
}

/// An element of the drawing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shown {
    /// A place, with its contents.
    Group {
        /// The title: `NUMA node 0`, or `host bridge 0000:15 · switch 0000:16:00.0` if the first
        /// contains only the second.
        title: String,
        /// Its contents.
        parts: Vec<Shown>,
    },
    /// A device, with its parts.
    Device {
        /// The device.
        leaf: Box<Leaf>,
        /// Its parts.
        parts: Vec<Shown>,
    },
    /// Equal devices.
    Alike(Alike),
}

/// Devices that are drawn as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alike {
    /// Their number, without those that are drawn alone.
    pub count: usize,
    /// Their kind: `rdma vf`.
    pub kind: String,
    /// The first and the last by name.
    pub range: (String, String),
    /// The resources that offer them.
    pub resources: Vec<String>,
    /// Whether all of them are known to be healthy.
    pub is_healthy: bool,
    /// The number of unhealthy ones among them: those beyond the number that can be drawn alone.
    pub unhealthy: usize,
    /// The number of held ones among them.
    pub held: usize,
}

impl Alike {
    /// Their state in words; `None` if unknown.
    #[must_use]
    pub fn state(&self) -> Option<String> {
        match self.unhealthy {
            0 => self.is_healthy.then(|| "healthy".to_owned()),
            unhealthy => Some(format!("{unhealthy} unhealthy")),
        }
    }
}

/// Folds a tree into its drawing; with `all` every device is drawn alone.
#[must_use]
pub fn fold(picture: &Picture, all: bool) -> Figure {
    Figure { parts: shown(&picture.parts, all) }
}

fn shown(parts: &[Part], all: bool) -> Vec<Shown> {
    let mut drawn: Vec<Shown> = Vec::new();
    let mut rest = parts;
    while let [part, ..] = rest {
        let alike = rest.iter().take_while(|other| is_like(part, other)).count();
        let (these, others) = rest.split_at(alike.max(1));
        rest = others;
        let max = if part.device.as_ref().is_some_and(|leaf| leaf.is_vf) {
            FUNCTIONS_MAX
        } else {
            DEVICES_MAX
        };
        if all || these.len() <= max {
            drawn.extend(these.iter().map(|part| one(part, all)));
        } else {
            drawn.extend(collapse(these, all));
        }
    }
    drawn
}

fn one(part: &Part, all: bool) -> Shown {
    match &part.device {
        Some(leaf) => {
            Shown::Device { leaf: Box::new(leaf.clone()), parts: shown(&part.parts, all) }
        }
        None => {
            let (mut title, mut part) = (title(part), part);
            // A host bridge that contains only a switch is merged with it.
            while let [only] = part.parts.as_slice()
                && part.kind != Kind::NumaNode
                && only.kind != Kind::Device
            {
                title = format!("{title} · {}", self::title(only));
                part = only;
            }
            Shown::Group { title, parts: shown(&part.parts, all) }
        }
    }
}

fn title(part: &Part) -> String {
    let kind = part.kind.in_words();
    let named = match (&part.name, part.kind) {
        (Some(name), _) => format!("{kind} {name}"),
        (None, Kind::NumaNode) => format!("{kind} unknown"),
        (None, _) => kind.to_owned(),
    };
    part.cpus.as_ref().map_or(named.clone(), |cpus| format!("{named}, processors {cpus}"))
}

/// Whether two devices would be drawn equally. A device with parts is drawn alone.
fn is_like(a: &Part, b: &Part) -> bool {
    let (Some(one), Some(other)) = (&a.device, &b.device) else { return false };
    let of = |leaf: &Leaf| (leaf.kind(), leaf.resources.clone(), leaf.model.clone());
    a.parts.is_empty() && b.parts.is_empty() && of(one) == of(other)
}

fn collapse(parts: &[Part], all: bool) -> Vec<Shown> {
    let stands_out = |part: &&Part| {
        part.device.as_ref().is_some_and(|leaf| leaf.is_unhealthy() || !leaf.holders.is_empty())
    };
    // Unhealthy devices come before held ones.
    let (bad, used): (Vec<&Part>, Vec<&Part>) = parts
        .iter()
        .filter(stands_out)
        .partition(|part| part.device.as_ref().is_some_and(Leaf::is_unhealthy));
    let alone: Vec<&Part> = bad.into_iter().chain(used).take(ALONE_MAX).collect();
    let rest: Vec<&Leaf> = parts
        .iter()
        .filter(|part| !alone.contains(part))
        .filter_map(|part| part.device.as_ref())
        .collect();
    let mut drawn: Vec<Shown> = alone.iter().map(|part| one(part, all)).collect();
    if let (Some(first), Some(last)) = (rest.first(), rest.last()) {
        drawn.push(Shown::Alike(Alike {
            count: rest.len(),
            kind: first.kind(),
            range: (first.name(), last.name()),
            resources: first.resources.clone(),
            is_healthy: rest.iter().all(|leaf| leaf.health == Some("Healthy")),
            unhealthy: rest.iter().filter(|leaf| leaf.is_unhealthy()).count(),
            held: rest.iter().filter(|leaf| !leaf.holders.is_empty()).count(),
        }));
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::super::testing::{holder, machine, node};
    use super::super::{Cpus, tree};
    use super::*;

    fn equal_devices_of(parts: &[Shown]) -> Option<&Alike> {
        parts.iter().find_map(|part| match part {
            Shown::Alike(alike) => Some(alike),
            Shown::Group { parts, .. } | Shown::Device { parts, .. } => equal_devices_of(parts),
        })
    }

    #[test]
    fn equal_functions_are_one_box_and_a_held_one_is_separate() {
        let picture = tree(machine(), &Cpus::new());
        let figure = fold(&picture, false);
        let rest = equal_devices_of(&figure.parts).unwrap();
        assert_eq!(
            (rest.count, rest.kind.as_str(), rest.held, rest.state()),
            (63, "rdma vf", 0, None)
        );
        assert_eq!(equal_devices_of(&fold(&picture, true).parts), None);
        let Shown::Group { parts, .. } = &figure.parts[0] else { unreachable!() };
        let Shown::Group { title, .. } = &parts[0] else { unreachable!() };
        assert_eq!(title, "host bridge 0000:15 · switch 0000:16:00.0");
    }

    #[test]
    fn of_equal_devices_unhealthy_ones_are_drawn_alone_first() {
        let leaf = |n: usize| {
            let leaf = Leaf { health: Some("Healthy"), ..node(&format!("/dev/x{n:03}")) };
            match n {
                0..100 => Leaf { holders: vec![holder("p")], ..leaf },
                100..103 => Leaf { health: Some("Unhealthy"), ..leaf },
                _ => leaf,
            }
        };
        let figure = fold(&tree((0..300).map(leaf), &Cpus::new()), false);
        let Shown::Group { parts, .. } = &figure.parts[0] else { unreachable!() };
        assert_eq!(parts.len(), ALONE_MAX + 1);
        assert!(matches!(&parts[0], Shown::Device { leaf, .. } if leaf.is_unhealthy()));
        let rest = equal_devices_of(parts).unwrap();
        assert_eq!((rest.count, rest.held, rest.unhealthy), (292, 95, 0));
        assert_eq!(rest.state().as_deref(), Some("healthy"));
    }
}
