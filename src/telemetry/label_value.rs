//! The values of labels that Kubernetes accepts.

/// The limit of a label's name without its prefix, and of its value (Kubernetes'
/// `validation.IsQualifiedName`, `IsValidLabelValue`).
pub(super) const LENGTH_MAX: usize = 63;

/// Whether Kubernetes accepts this value of a label, if it is not empty.
pub(super) fn is_valid(text: &str) -> bool {
    let (Some(first), Some(last)) = (text.chars().next(), text.chars().last()) else {
        return false;
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.len() <= LENGTH_MAX
        && first.is_ascii_alphanumeric()
        && last.is_ascii_alphanumeric()
        && text.chars().all(is_plain)
}
