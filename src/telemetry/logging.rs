//! Logs on standard error, as text for people or JSON for machines.
//!
//! ERROR: the daemon cannot keep a promise. WARN: an operator should check, but not at once. INFO:
//! one line for each change of state. DEBUG: every step. `HOLDFAST_LOG` takes filters such as
//! `debug` or `holdfast::registration=debug`.
//!
//! An event is one line, even if it quotes names with line breaks: see [`Printable`]. In JSON
//! `LogWriter` ensures that.

use super::log_format::LogFormat;
use super::log_writer::LogWriter;
use crate::domain::Printable;
use std::fmt::{self as text, Write};
use std::io::IsTerminal;
use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{FormatFields, Writer, debug_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// Starts logging for the whole process, and logs panics as errors. Later calls have no effect.
pub fn init(format: LogFormat, default_level: &str) {
    // `Targets`, not `EnvFilter`: the latter contains a regular-expression engine, a megabyte of
    // the daemon's memory.
    let wanted =
        std::env::var("HOLDFAST_LOG").ok().and_then(|filter| filter.parse::<Targets>().ok());
    let filter = wanted.or_else(|| default_level.parse().ok()).unwrap_or_default();
    let colour = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = fmt::layer()
        .with_writer(LogWriter::new(std::io::stderr(), format))
        .with_ansi(colour)
        // A reader of the log that disconnects must not end the daemon: the layer would report the
        // error on the same stream, and panic.
        .log_internal_errors(false);
    let layer = match format {
        LogFormat::Text => layer.with_target(false).fmt_fields(fields()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let started = tracing_subscriber::registry().with(layer.with_filter(filter)).try_init();
    if started.is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let text = panic.payload_as_str().unwrap_or("no message");
            tracing::error!(place, panic = text, "a panic was caught");
        }));
    }
}

/// Writes the message and the fields of an event into its line.
fn fields() -> impl for<'a> FormatFields<'a> + Send + Sync + 'static {
    debug_fn(|line: &mut Writer<'_>, field: &Field, value: &dyn text::Debug| {
        match (field.name(), line.has_ansi_escapes()) {
            ("message", _) => {}
            (name, true) => write!(line, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
            (name, false) => write!(line, "{name}=")?,
        }
        write!(Printable(line), "{value:?}")
    })
    .delimited(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::is_unprintable;
    use proptest::prelude::*;

    /// The output for an event with a foreign name in its message and its fields, in this form.
    fn logged(format: LogFormat, colour: bool, name: &str) -> String {
        let (reader, writer) = std::io::pipe().unwrap();
        let layer = fmt::layer().with_writer(LogWriter::new(writer, format)).with_ansi(colour);
        let layer = match format {
            LogFormat::Text => layer.with_target(false).fmt_fields(fields()).boxed(),
            LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
        };
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(device = %name, quoted = name, error = &std::io::Error::other(name.to_owned()) as &dyn std::error::Error, "{name} is absent");
        });
        std::io::read_to_string(reader).unwrap()
    }

    #[test]
    fn every_event_is_one_line_of_text_or_one_json_object() {
        let name = "a\u{1b}[2J\n2026-01-01T00:00:00Z ERROR forged\u{202e}";
        let text = logged(LogFormat::Text, false, name);
        let shown = "a\\u{1b}[2J\\n2026-01-01T00:00:00Z ERROR forged\\u{202e}";
        assert!(
            text.ends_with(&format!(
                " WARN {shown} is absent device={shown} quoted=\"{shown}\" error={shown}\n"
            )),
            "{text}"
        );
        let json = logged(LogFormat::Json, false, name);
        assert_eq!(json.lines().count(), 1, "{json}");
        let event: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((event["device"].as_str(), event["quoted"].as_str()), (Some(name), Some(name)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn nothing_unprintable_reaches_the_log(name in any::<String>()) {
            let colours = ["\x1b[0m", "\x1b[2m", "\x1b[3m", "\x1b[33m"];
            for (format, colour) in [(LogFormat::Text, false), (LogFormat::Text, true), (LogFormat::Json, false)] {
                let line = logged(format, colour, &name);
                let own = if colour { colours.iter().fold(line.clone(), |line, own| line.replace(own, "")) } else { line.clone() };
                let rest = own.strip_suffix('\n').unwrap();
                prop_assert!(!rest.contains(is_unprintable), "{line:?}");
                if format == LogFormat::Json {
                    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
                    prop_assert_eq!(event["device"].as_str(), Some(name.as_str()));
                }
            }
        }
    }
}
