//! The containers of pods and pod templates, and which of them runs the plugin.

use super::field::Field;
use super::peers::Facts;

/// The containers of a pod, or of the pod template of an object.
pub(super) fn containers<'a>(object: &Field<'a>) -> Vec<Field<'a>> {
    let spec = object.get("spec");
    let pod = spec.as_ref().and_then(|spec| spec.get("template")?.get("spec")).or(spec);
    pod.and_then(|pod| pod.get("containers")).and_then(|list| list.items().ok()).unwrap_or_default()
}

/// Whether a container runs the plugin.
pub(super) fn is_plugin_container(facts: &Facts, container: &Field<'_>) -> bool {
    match program(container) {
        Some(program) => program == facts.program,
        None => image(container).contains(facts.image),
    }
}

pub(super) fn program(container: &Field<'_>) -> Option<String> {
    let command = container.get("command")?.items().ok()?;
    let path = command.first()?.text().ok()?;
    Some(path.rsplit('/').next().unwrap_or(path).to_owned())
}

/// The name of a container's image. Charts have its parts as keys below it.
pub(super) fn image(container: &Field<'_>) -> String {
    let Some(image) = container.get("image") else { return String::new() };
    let part = |key: &str| image.get(key).and_then(|part| part.text().ok());
    match (part("repository"), part("tag")) {
        (Some(name), Some(tag)) => format!("{name}:{tag}"),
        (Some(name), None) => name.to_owned(),
        _ => image.text().unwrap_or_default().to_owned(),
    }
}
